"""Defines the holders whose hosts are read, with the processes that the driver lists on their GPUs."""

from __future__ import annotations

from typing import NamedTuple

from gpu_exporter.common.model.holders import Who


class RankedGpu(NamedTuple):
    """A GPU of a holder: the CPUs near it (empty if unknown), and the pids that have a context on it."""

    uuid: str
    cpus: frozenset[int]
    pids: tuple[int, ...]

    def __repr__(self) -> str:
        return "RankedGpu(...)"  # printing it must not print a pid


class HostSubject(NamedTuple):
    """A holder whose host is read. `gpus`: its GPUs with their processes, None if the processes are unknown."""

    who: Who
    gpus: tuple[RankedGpu, ...] | None
