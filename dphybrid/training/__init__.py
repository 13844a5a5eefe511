"""Training: the loop, its clock, its metrics, its checkpoints."""
