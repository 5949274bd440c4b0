"""Several ranks on CPU processes: transport, communication ops in Paddle programs, installation in a rank."""
