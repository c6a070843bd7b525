"""Reports pods and their GPUs, from the kubelet's PodResources API and from files of the host."""
