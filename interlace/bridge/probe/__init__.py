"""Small programs that run on the device and are observed: the base of `interlace doctor` and `interlace calibrate`."""
