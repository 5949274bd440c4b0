"""What `interlace calibrate` measures of a device, through Paddle itself."""
