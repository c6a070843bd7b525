"""Decisions from evidence: pure, holder by holder, and `unknown` takes precedence over idle."""
