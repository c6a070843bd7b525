"""Stands for torch.cuda in a workload: events on the queue of the simulated GPU, for the hook of docs/torch.md."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

from tests.workloads.device import SimulatedDevice


def install(device: SimulatedDevice) -> None:
    """From now on the hook finds this GPU. An event is reached when the queue has done all that came before it."""

    class QueueEvent:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = device.reached_at()

        def query(self) -> bool:
            return self.at <= time.monotonic()

        def elapsed_time(self, end: QueueEvent) -> float:
            return (end.at - self.at) * 1e3

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_current_stream_capturing=lambda: False,
        get_device_properties=lambda number: SimpleNamespace(),
        Event=QueueEvent,
    )
    sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
        cuda=cuda,
        __version__="simulated",
        is_autocast_enabled=lambda: False,
        get_float32_matmul_precision=lambda: "highest",
    )
