"""HTTP server for the pages and probes of the exporter and the reconciler."""
