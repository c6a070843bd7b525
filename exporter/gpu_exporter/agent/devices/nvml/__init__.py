"""Reads GPUs through NVML. No other package imports pynvml."""
