"""Slurm's own notations. Whoever reads what Slurm writes, on a node or about the cluster, reads it by these."""
