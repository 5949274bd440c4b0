"""Simulation of plans in time.

`lower` turns the plans of all ranks into arrays. `simulator` is the specification: it defines the overlap clock, runs small plans
faster than the compiled engine starts (importing numba takes 0.2 s), and runs all plans if numba is not installed. `compiled` has the
same steps as one numba function, about a hundred times as fast; tests compare the two on random plans.
"""
