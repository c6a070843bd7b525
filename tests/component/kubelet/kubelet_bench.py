"""Ids of a GPU and of a MIG instance, and the log of a container that starts."""

from __future__ import annotations

import os
from pathlib import Path

from tests.testbed.podresources import begin_container

UUID = "GPU-11111111-2222-3333-4444-555555555555"
MIG = "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


def begin(pod_directory: Path, number: int, at: float) -> None:
    """Record a start of a container at the given time."""
    pod, container = pod_directory.parent, pod_directory.name
    os.utime(begin_container(pod.parent, pod.name, number, container), (at, at))
