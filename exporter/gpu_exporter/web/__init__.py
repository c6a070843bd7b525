"""HTTP for bodies of ours: an exporter's and the reconciler's pages and probes."""
