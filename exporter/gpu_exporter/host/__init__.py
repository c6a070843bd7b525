"""What holders do on the host's own processors and disks, beside their GPUs."""
