"""Reads gpu-exporter's own series: hours from the exporters' tenant counters, holders and money from the recordings."""
