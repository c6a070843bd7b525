"""The agent of a node: reads GPUs and their holders, counts, and publishes."""
