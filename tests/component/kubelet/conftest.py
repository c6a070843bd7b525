"""A server of the PodResources API, the real gRPC implementation on a unix socket, and the source that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA
from tests.testbed.podresources import Kubelet


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path / "kubelet.sock")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def source(kubelet: Kubelet, clock: ManualClock, tmp_path: Path) -> KubeletSource:
    (tmp_path / "pods").mkdir()
    return KubeletSource(
        clock,
        KubeletOptions(socket=kubelet.socket, logs=tmp_path / "pods", timeout_s=10.0, empty_confirm_s=5.0),
        vendor=NVIDIA,
    )
