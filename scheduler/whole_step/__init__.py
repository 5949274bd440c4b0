"""One schedule for the step of all stages: the delay of weight gradients, and the number of micro-batches in flight on each stage.

`interleave/slot_times` gives the time of each kind of job on a stage and when its messages leave, `coarse` runs a schedule of such jobs,
and `search` finds the schedules worth planning in full. The simulator then decides between them (`interlace/planning`).
"""
