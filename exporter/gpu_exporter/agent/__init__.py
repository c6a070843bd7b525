"""The agent of a node: reads its GPUs, finds their holders, counts their use, and publishes metrics."""
