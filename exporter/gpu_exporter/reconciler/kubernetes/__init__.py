"""Pods of Kubernetes: their surroundings, their marks, and acts on their controllers."""
