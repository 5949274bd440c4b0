"""Scheduling decisions (job order, order inside pairs, offload), and the simulator, memory models and checker that evaluate them."""
