"""The one place the version number stands."""

VERSION = "0.1.0"
