"""The collectors, one subject per file. A collector reads values of a GPU and lists the metrics that it publishes."""
