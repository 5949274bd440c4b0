"""The order of operations inside a job with parts of several micro-batches: a list schedule, then local search."""
