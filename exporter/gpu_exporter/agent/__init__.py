"""The agent of a node: reads its GPUs and who holds them, counts their use, and publishes metrics."""
