"""Integrals per unit and per (unit, holder). Imports the model only."""
