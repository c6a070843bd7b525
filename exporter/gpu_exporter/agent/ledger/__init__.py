"""Counts time and energy for each unit, and for each holder on a unit. Imports the model only."""
