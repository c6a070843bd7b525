"""Puts the packages of the agent together. Imported by the command line alone."""
