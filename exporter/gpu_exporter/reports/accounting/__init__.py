"""Compares GPU-hours in Slurm's accounting with GPU-hours that the exporters counted."""
