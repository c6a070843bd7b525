"""`gpu-exporter top`: the table of one or several nodes in a terminal."""
