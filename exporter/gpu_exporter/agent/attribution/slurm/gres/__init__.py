"""Finds the GPU that an IDX means. Slurm reports a job's GPUs as IDX: positions in the node's list of GPUs.

Reads slurmd's gres.conf, and remembers which order of GPUs applied at what time.
"""
