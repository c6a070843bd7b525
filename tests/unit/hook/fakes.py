"""Parts of torch that a loop touches, for tests without torch: an optimizer with hooks, a GPU with a queue."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class FakeOptimizer:
    """Calls its hooks after each step, as torch.optim.Optimizer does."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., None]] = []
        self.param_groups = [
            {"params": [SimpleNamespace(dtype="torch.float32", device=SimpleNamespace(type="cuda", index=0))]}
        ]
        self.steps = 0

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def step(self) -> None:
        self.steps += 1
        for hook in list(self.hooks):
            hook(self, (), {})


class FakeGpu:
    """A stream: work is done in order, and an event is reached when all work before it is done. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0  # of the CPU
        self.free_at = 0.0  # when the stream has done all its work
        self.recorded = 0
        self.is_capturing = False
        self.device = 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at: float | None = None

            def record(self) -> None:
                assert not gpu.is_capturing, "an event inside of a capture breaks it"
                gpu.recorded += 1
                self.at = max(gpu.now, gpu.free_at)

            def query(self) -> bool:
                return self.at is not None and self.at <= gpu.now

            def elapsed_time(self, end: Event) -> float:
                assert self.query() and end.query() and self.at is not None and end.at is not None
                return (end.at - self.at) * 1e3

        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            current_device=lambda: gpu.device,
            device_count=lambda: 1,
            is_current_stream_capturing=lambda: gpu.is_capturing,
            Event=Event,
            get_device_properties=lambda device: SimpleNamespace(uuid=f"aaaa-{device}"),
        )
        torch = SimpleNamespace(
            cuda=cuda,
            __version__="0",
            is_autocast_enabled=lambda: False,
            get_float32_matmul_precision=lambda: "highest",
        )
        monkeypatch.setitem(__import__("sys").modules, "torch", torch)
