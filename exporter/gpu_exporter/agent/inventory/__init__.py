"""The GPUs that this host should have: GPUs that answered before, and GPUs that the kernel lists on the PCI bus."""
