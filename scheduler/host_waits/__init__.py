"""Where in its jobs the host waits for the device, so that it runs no further ahead than memory allows."""
