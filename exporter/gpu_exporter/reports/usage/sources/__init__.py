"""Reads the history of exporters. Each module reads one kind of exporter, as cells (cells.py)."""
