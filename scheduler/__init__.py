"""Decisions: job order, order inside pairs, what to offload; and their judges: simulator, memory, hazards."""
