"""Which layout a script is to be trained with: candidates are built, excluded by bounds, simulated and planned; nothing is launched."""
