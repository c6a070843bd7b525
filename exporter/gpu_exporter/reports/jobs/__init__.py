"""The report about one job or pod: what its GPUs did, compared with what the scheduler gave it."""
