"""Decides on each holder from evidence. `unknown` takes precedence over idle. Pure."""
