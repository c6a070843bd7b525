"""The source gpu-exporter: hours from the tenant counters of its exporters, holders and money from its recordings."""
