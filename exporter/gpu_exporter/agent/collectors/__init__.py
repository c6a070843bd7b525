"""The collectors, one subject per file. A collector reads values of a GPU, and declares its metrics."""
