"""Reads the GPUs at intervals, each with its own thread and deadline. Makes each reading an immutable snapshot."""
