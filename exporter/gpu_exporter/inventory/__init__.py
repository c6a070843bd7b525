"""Which GPUs should be here: those that were seen before, and those that the kernel shows on the bus."""
