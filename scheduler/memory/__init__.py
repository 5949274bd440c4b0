"""Device memory over a step: live bytes (`live`), and what Paddle's executor adds (`executor`)."""
