"""Code that the exporter, the reconciler and the other programs share."""
