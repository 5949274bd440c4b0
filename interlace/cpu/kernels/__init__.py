"""C++ kernels for CPU processes: their source, the names that they are registered for, and how they are compiled."""
