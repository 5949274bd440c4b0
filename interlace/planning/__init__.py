"""From captured programs to plans: passes run, are judged by the simulated step, and are held to a memory budget, on all ranks together."""
