"""gpu-exporter: shows which pod or job holds each GPU, how busy the GPU is, and why it is idle."""

from gpu_exporter.common.version import VERSION

__all__ = ["VERSION"]
