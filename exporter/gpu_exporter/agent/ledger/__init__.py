"""Counts busy, idle and held time and energy, for each unit and for each holder on a unit. Imports only the model."""
