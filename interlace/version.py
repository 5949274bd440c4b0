"""The version of Interlace, and the versions of Paddle that it is tested with."""

VERSION = "0.1.0"
PADDLE = "3.3.1"
TESTED = ("3.3.0", PADDLE)
