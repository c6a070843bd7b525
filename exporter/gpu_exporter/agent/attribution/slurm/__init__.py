"""Finds the Slurm jobs of this node and their GPUs: from slurmctld, gres.conf, the jobs' steps and a prolog's files."""
