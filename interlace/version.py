"""The version of Interlace, and of the Paddle that it is built for."""

VERSION = "0.1.0"
PADDLE = "3.3.1"
