"""Queries a scheduler from one process for a whole cluster, so that its nodes need not."""
