"""Finds when a GPU worked, from each reading: by the driver's ring buffers, GPM and other witnesses of activity."""
