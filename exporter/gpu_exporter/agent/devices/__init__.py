"""Reads the hardware. Independent of intervals, pods, jobs and HTTP."""
