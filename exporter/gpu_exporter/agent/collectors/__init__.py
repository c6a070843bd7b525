"""Collectors, one subject per file. Each file defines what the collector reads, and lists the metric families that it
publishes.
"""
