"""The hook for training loops. It measures, inside the loop, the waits of each step.

    from gpu_exporter_torch import observe

    with observe(loader, optimizer=optimizer) as batches:
        for batch in batches:
            ...

This package imports no other part of gpu-exporter, changes nothing in torch, and needs no GPU. The exporter reads the
files that the hook writes (docs/torch.md).
"""

from __future__ import annotations

from gpu_exporter_torch.observation import observe

__all__ = ["observe"]
