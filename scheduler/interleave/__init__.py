"""The order of operations inside a job that holds parts of several micro-batches: a list schedule, then local search."""
