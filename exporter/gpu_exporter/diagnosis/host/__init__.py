"""Work of holders on the host's processors and disks, in addition to their GPUs."""
