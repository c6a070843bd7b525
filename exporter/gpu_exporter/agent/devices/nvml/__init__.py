"""The NVML backend: the only place that imports pynvml."""
