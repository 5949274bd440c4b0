"""Checks of what plans assume about a machine and its build of Paddle (`interlace doctor`)."""
