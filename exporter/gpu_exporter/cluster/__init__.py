"""What one process asks a scheduler for a whole cluster, in place of each of its nodes."""
