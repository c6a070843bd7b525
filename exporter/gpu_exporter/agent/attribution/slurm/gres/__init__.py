"""Finds the GPU that an IDX means: reads slurmd's gres.conf, and remembers which order of GPUs applied at what time.

Slurm reports a job's GPUs as IDX: positions in the node's list of GPUs.
"""
