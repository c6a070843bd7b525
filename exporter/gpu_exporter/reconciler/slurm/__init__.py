"""Jobs of Slurm: their surroundings, their marks, actions on them, and the demand for GPUs."""
