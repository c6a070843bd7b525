"""Parsers of Slurm's own notations, for every reader of Slurm's texts, on a node or in the cluster."""
