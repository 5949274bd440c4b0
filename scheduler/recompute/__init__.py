"""Recomputation: what a program repeats, what it could repeat, and the cheapest choice of values to keep."""
