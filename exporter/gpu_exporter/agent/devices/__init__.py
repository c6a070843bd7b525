"""Reads the values of the GPUs. Has no code for intervals, pods, jobs or HTTP."""
