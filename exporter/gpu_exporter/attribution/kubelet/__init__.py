"""Pods by the kubelet: its PodResources API, and what the host knows of them."""
