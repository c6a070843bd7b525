"""Reads the holders' use of the host's CPUs, disks and network, beside their GPUs."""
