"""The hook for training loops: what each step waits for, told by the loop itself.

    from gpu_exporter_torch import observe

    with observe(loader, optimizer=optimizer) as batches:
        for batch in batches:
            ...

This package imports nothing else of gpu-exporter, changes nothing in torch, and needs no GPU. The exporter reads the
files that it writes (docs/torch.md).
"""

from __future__ import annotations

from gpu_exporter_torch.observation import observe

__all__ = ["observe"]
