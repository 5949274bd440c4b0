"""Kernels in C++ for CPU processes: their source, the names they are for, and how they are compiled."""
