"""Queries a long past from any PromQL API, in chunks that respect the server's limits."""
