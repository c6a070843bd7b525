"""Wiring: the only room that knows every room. Imported by the command line alone."""
