"""Decides which holders are underused, marks them, and acts on them where the site allows that.

Evidence comes from metrics alone, surroundings from the live objects of Kubernetes and Slurm.
"""
