"""Decides which holders are underused, from metrics alone. Imports the model, the settings and nothing else of ours."""
