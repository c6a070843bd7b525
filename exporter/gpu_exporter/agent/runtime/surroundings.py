"""Defines how an agent reads its host, and how it publishes its results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from gpu_exporter.agent.attribution.processes import ProcessOwners
    from gpu_exporter.common.tasks import Task
    from gpu_exporter.diagnosis.interface import HostNode, HostWorks


class HostReader(Protocol):
    """Reads the holders' use of the host's CPUs and disks, in its `tasks`. `works`: the results, or None."""

    @property
    def works(self) -> HostWorks | None: ...

    @property
    def tasks(self) -> Sequence[Task]: ...

    def run(self, stop: threading.Event, node: HostNode) -> None: ...


class Host(NamedTuple):
    """The agent's access to the host, beside the driver.

    - `sysfs`: the PCI bus, None if the GPUs are not GPUs of this host.
    - `processes`: looks up the owners of the processes on each GPU, None if owners are unknown.
    - `kmsg`: the kernel log, None to leave it unread.
    - `reader`: reads the holders' work on the host, None if unknown.
    - `directory`: if no state file is kept, the directory for the list of GPUs and for the key that hides users' names.
    """

    sysfs: Path | None = None
    processes: ProcessOwners | None = None
    kmsg: Path | None = None
    reader: HostReader | None = None
    directory: Path | None = None


class Publishing(NamedTuple):
    """Settings for publishing the results.

    - `note`: text for the status page.
    - `interval_s`: seconds between two writes of a textfile, 0 without a textfile.
    - `driver_period_max_s`: longest sample period of the driver in seconds.
    """

    note: str = ""
    interval_s: float = 0.0
    driver_period_max_s: float = 1.0
