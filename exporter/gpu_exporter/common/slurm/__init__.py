"""Parsers of Slurm's notations, for all programs that read Slurm's output, on a node or in the cluster."""
