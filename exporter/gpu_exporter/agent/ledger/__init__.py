"""Counts busy, idle and held seconds, and joules, of each unit and of each holder on a unit. Imports only the model."""
