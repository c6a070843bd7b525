"""Reports the use of one job's or pod's GPUs, compared with the GPUs that its scheduler gave it."""
