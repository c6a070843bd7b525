"""Pods of Kubernetes: their surroundings, their marks, and actions on their controllers."""
