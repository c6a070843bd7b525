"""Finds the holder (a pod or Slurm job) of each unit (a GPU or MIG instance) from the reports of the schedulers."""
