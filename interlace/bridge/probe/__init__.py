"""Small programs that run on the device, and what is seen of them: what `interlace doctor` and `interlace calibrate` are built on."""
