"""Jobs of a stage from a schedule: options, legality of rows, operations of each kind of part, and their order inside jobs."""
