"""Decides on each holder from its evidence. `unknown` takes precedence over idle. Pure."""
