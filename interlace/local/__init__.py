"""Training on several CPU processes of this machine: the launcher, one rank's process, what it reports, and communication between them."""
