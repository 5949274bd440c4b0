"""Device memory over a step: live bytes (`live`), what Paddle's executor adds (`executor`), waits of the host (`throttle`)."""
