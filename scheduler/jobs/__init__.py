"""From a schedule to the jobs of a stage: options, legal rows, operations of each kind of part, and their order inside jobs."""
