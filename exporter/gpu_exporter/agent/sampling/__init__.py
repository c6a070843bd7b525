"""Sampling: one loop and one deadline per device, immutable snapshots."""
