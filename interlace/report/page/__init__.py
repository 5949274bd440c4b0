"""The page about a plan: one HTML file with everything in it."""
