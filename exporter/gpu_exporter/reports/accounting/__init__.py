"""GPU-hours by Slurm's record and by gpu-exporter, compared."""
