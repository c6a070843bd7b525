"""Measures each holder's work on the host: the share of its CPUs in use, and its disk traffic.

During a download or preprocessing, the GPU is idle but its holder works. This work can only delay a verdict on the
holder; it never causes one. The exporter publishes the mean of ten minutes, so that a scrape once a minute misses
nothing. The holder's CPUs are those that its quota or cpuset allows. Without such a limit, they are a share of the
host's CPUs: its share of the node's GPUs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from pathlib import PurePosixPath
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Allocation, Who, identify
from gpu_exporter.common.model.views import HostWork
from gpu_exporter.diagnosis.host.cgroups import CgroupReading, Cgroups

SEARCH_S = 60.0  # a search visits every cgroup of the host, some 20 us for each ...
SEARCH_MAX_S = 960.0  # ... so the pause doubles after a search without a result: Slurm may not use cgroups at all
WINDOW_S = 600.0
SPAN_MIN_S = 60.0  # a shorter span is mostly noise


class _WorkSample(NamedTuple):
    monotonic: float
    reading: CgroupReading


class HostWorks:
    """Measures the holders' work by cgroups (`places`). Any thread may read `works`, which is replaced as a whole."""

    def __init__(self, cgroups: Cgroups, clock: Clock, host_cpus: int) -> None:
        """`host_cpus`: the number of CPUs of the whole host."""
        self.works: Mapping[Who, HostWork] = {}
        self._cgroups = cgroups
        self._clock = clock
        self._host_cpus = host_cpus
        self.places: dict[Who, PurePosixPath] = {}
        self._samples: dict[Who, deque[_WorkSample]] = {}
        self._missing: Set[Who] = frozenset()
        self._searched = -math.inf  # monotonic
        self._pause_s = SEARCH_S

    def read(self, allocations: Iterable[Allocation], gpus: int) -> None:
        """Reads all cgroups once. `gpus`: the number of GPUs of the node."""
        parts: dict[Who, float] = {}
        for allocation in allocations:
            if (who := identify(allocation.holder)) is not None:
                parts[who] = parts.get(who, 0.0) + allocation.share_ratio
        self.places = {who: place for who, place in self.places.items() if who in parts}
        self._samples = {who: samples for who, samples in self._samples.items() if who in parts}
        self._search(parts.keys() - self.places.keys())
        works: dict[Who, HostWork] = {}
        for who, place in list(self.places.items()):
            reading = self._cgroups.read(place)
            if reading is None:  # ended, or created again elsewhere
                del self.places[who]
                self._samples.pop(who, None)
            elif (work := self._add(who, reading, parts[who] / max(1, gpus))) is not None:
                works[who] = work
        self.works = works

    def _search(self, missing: Set[Who]) -> None:
        """Searches for the cgroups of `missing` at most once a minute; less often after a search without result."""
        now = self._clock.monotonic()
        if missing - self._missing:  # a new holder
            self._pause_s = SEARCH_S
        if not missing or now < self._searched + self._pause_s:
            return
        found = self._cgroups.find(missing)
        self._pause_s = SEARCH_S if found else min(2 * self._pause_s, SEARCH_MAX_S)
        self._searched, self._missing = now, missing
        self.places |= found

    def _add(self, who: Who, reading: CgroupReading, part: float) -> HostWork | None:
        """The holder's work. None until enough time has passed. `part`: its share of the node's GPUs, 0 to 1."""
        now = self._clock.monotonic()
        samples = self._samples.setdefault(who, deque())
        if samples and reading.cpu_s < samples[-1].reading.cpu_s:  # another cgroup with the same name
            samples.clear()
        samples.append(_WorkSample(now, reading))
        while len(samples) > 1 and now - samples[1].monotonic >= WINDOW_S:
            samples.popleft()
        first = samples[0]
        span_s = now - first.monotonic
        if span_s < SPAN_MIN_S:
            return None
        limit = reading.cpus if reading.cpus is not None else self._host_cpus
        if limit >= self._host_cpus:  # this is no limit
            limit = max(1.0, self._host_cpus * min(1.0, part))
        ratio = min(1.0, (reading.cpu_s - first.reading.cpu_s) / span_s / limit)  # it may use more than its share
        now_bytes, then_bytes = reading.io_bytes, first.reading.io_bytes
        traffic = None if now_bytes is None or then_bytes is None else max(0.0, now_bytes - then_bytes) / span_s
        return HostWork(ratio, traffic, limit)
