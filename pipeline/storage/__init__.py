"""File systems: what a user types -> where it is, and the few operations that the pipeline needs there. Knows nothing of runs."""
