"""Queries to a PromQL API and to servers beside it, with the credentials of the site."""
