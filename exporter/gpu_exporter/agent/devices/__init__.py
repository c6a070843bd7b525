"""Reads the GPUs. Knows nothing of intervals, pods, jobs and HTTP."""
