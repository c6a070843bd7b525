"""The resources whose devices are GPUs, without any of a site's own."""

from __future__ import annotations

from gpu_exporter.common.vendor import NVIDIA

GPU_RESOURCES = NVIDIA.resources()
