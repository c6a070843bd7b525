"""Finds the GPU of an IDX. Slurm reports a job's GPUs as IDX: positions in the node's list of GPUs. Reads slurmd's
gres.conf, and remembers the valid order of GPUs for each time.
"""
