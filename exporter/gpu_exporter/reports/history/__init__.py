"""Queries over a long past to any PromQL API, in chunks that obey the limits of the server."""
