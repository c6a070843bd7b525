"""Resolves an IDX to a GPU: finds and reads slurmd's gres.conf, and remembers which order applied at what time."""
