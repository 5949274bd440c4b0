"""`assign-streams` (first form)."""
