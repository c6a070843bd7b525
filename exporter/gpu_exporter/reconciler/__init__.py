"""Decides which holders are underused, marks them, and acts on them if the site allows that.

The evidence comes only from metrics. The surroundings of a holder come from the live objects of Kubernetes and Slurm.
"""
