"""Pods: what surrounds them, and the marks that they carry."""
