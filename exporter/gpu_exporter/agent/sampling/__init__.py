"""Reads the GPUs at intervals: one thread and one deadline per GPU. Each reading becomes an immutable snapshot."""
