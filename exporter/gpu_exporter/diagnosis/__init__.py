"""Judges the state of each allocation, and finds the evidence and the causes, from snapshots and counters. Pure."""
