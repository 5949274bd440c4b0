"""First contact: what is assumed of a machine and its build of Paddle, held against what happens."""
