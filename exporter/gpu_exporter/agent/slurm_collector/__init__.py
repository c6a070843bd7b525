"""Queries Slurm from one process for a whole cluster, so that the nodes do not have to."""
