"""What the hardware says. Knows nothing of intervals, pods, jobs or HTTP."""
