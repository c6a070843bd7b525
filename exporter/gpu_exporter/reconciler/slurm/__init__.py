"""Jobs of Slurm: their surroundings, their marks, acts on them, and the demand for GPUs."""
