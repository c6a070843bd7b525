"""Finds out when a GPU worked, from the driver's ring buffers, GPM and the other witnesses of activity."""
