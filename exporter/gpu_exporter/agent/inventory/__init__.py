"""Which GPUs this host should have: GPUs that were seen before, and GPUs that the kernel lists on the bus."""
