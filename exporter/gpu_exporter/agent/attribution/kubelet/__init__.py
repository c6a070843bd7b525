"""Pods from the kubelet's PodResources API and from the host's files."""
