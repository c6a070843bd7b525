"""The exporters whose history a report reads, each in the terms of units, holders and windows."""
