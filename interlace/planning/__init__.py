"""From captured programs to plans: run the passes, judge them by the simulated step, and keep memory budgets, on all ranks together."""
