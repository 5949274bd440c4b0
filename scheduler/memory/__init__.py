"""Device memory over a step: live bytes (`live`), and the effects of Paddle's executor on them (`executor`)."""
