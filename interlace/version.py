"""The one place where version numbers stand: our own, and that of the Paddle we are built for."""

VERSION = "0.1.0"
PADDLE = "3.3.1"
