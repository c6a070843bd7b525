"""Collectors, one subject per file: what it reads, and the families that it publishes, as data."""
