"""Search for the layout with which a script trains fastest: layouts are built, excluded by bounds, simulated and planned, never
launched."""
