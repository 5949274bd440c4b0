"""One schedule for the step of all stages: how far weight gradients trail, and how many micro-batches each stage holds.

`slot_times` says how long each kind of job takes on a stage and when its messages leave, `coarse` runs a schedule of such jobs, and
`search` finds the schedules worth planning in full. The simulator of operations then decides between them (`interlace/planning`).
"""
