"""gpu-exporter: who holds which GPU, is it used, and if not, why."""

from gpu_exporter.version import VERSION

__all__ = ["VERSION"]
