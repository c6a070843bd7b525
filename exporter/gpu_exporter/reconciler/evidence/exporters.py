"""Reads evidence from the exporters themselves, without Prometheus.

The exporter counts idle runs, so one reading shows how long a unit has been idle. Only the coverage needs older values:
one sample of the counters per minute and allocation (coverage.py).
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError, fetch_text
from gpu_exporter.common.model.holders import ALLOCATION_KEY, PROCESS_SOURCE
from gpu_exporter.common.model.readings import CORE
from gpu_exporter.common.threads import NoThread, run_ahead, start
from gpu_exporter.reconciler.evidence.coverage import Counters
from gpu_exporter.reconciler.evidence.records import (
    CAUSES_MAX,
    EVIDENCE_S,
    HOST_KEEP_S,
    MORE_CAREFUL,
    SEEN_S,
    WORK_ELSEWHERE,
    Evidence,
    Gathered,
    HolderName,
    HostLimits,
    OtherActivity,
    PublishedCause,
    UnitEvidence,
    UnitUse,
    Unseen,
    UseOfUnits,
    cause_of,
    holder_name,
    is_hidden,
    obstacle_of,
    refuse_renamed,
)
from gpu_exporter.reconciler.evidence.use import STATUS, parse_use

MAX_EXPORTERS = 200
FETCHES = 16  # in parallel, so that answers do not become old while another node does not answer
HOST_WORK = ("activity_ratio", "io_bytes_per_second")  # as in HostLimits
Key: TypeAlias = tuple[str, ...]


def parse_exporter(text: str) -> Address:
    """Converts `host:9836` or `http://host:9836` to the address of the metrics. Raises ValueError."""
    address = parse_address(text, scheme="http")
    return address.page("/metrics") if address.path in ("", "/") else address


class ExporterSource:
    """Reads every exporter once in each cycle."""

    def __init__(
        self,
        addresses: Sequence[Address],
        window_s: float,
        clock: Clock,
        fetch: Callable[[Address], str] = fetch_text,
        within_s: float = EVIDENCE_S,
        host: HostLimits | None = None,
    ) -> None:
        """`window_s`: window for the coverage (seconds). `within_s`: the time limit for answers of exporters (seconds).
        `host`: limits of work on the host; None if past work does not count.

        Raises ValueError for too many exporters.
        """
        if len(addresses) > MAX_EXPORTERS:
            raise ValueError(f"{len(addresses)} exporters exceed the limit of {MAX_EXPORTERS}: use --source.prometheus")
        self._addresses = list(dict.fromkeys(addresses))
        self._window_s = window_s
        self._clock = clock
        self._fetch = fetch
        self._within_s = within_s
        self._counters: dict[Key, Counters] = {}
        self._shown: dict[str, tuple[float, dict[Key, Unseen]]] = {}  # by exporter: when it last answered (wall)
        self._limits = host
        self._worked: dict[Key, float] = {}  # when a holder was last seen to work outside its GPUs (wall)
        self._used: dict[Key, float] = {}  # when it was last seen to use CORE or more (wall)
        self._host: dict[Key, tuple[float, float]] = {}  # when a value was last published (wall), and the value

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        wall = self._clock.wall()
        pages: list[_Page] = []
        errors: list[AnswerError] = []
        for page in self._read_pages().values():
            if isinstance(page, _Page):
                pages.append(page)
            else:  # its units are missing, so holders with other units elsewhere become `unknown`
                errors.append(page)
        problems = [str(error) for error in errors]
        if not pages:
            kind = FetchError if all(isinstance(error, FetchError) for error in errors) else AnswerError
            raise kind("; ".join(problems[:3]))
        self._forget(pages, wall)
        holders: dict[HolderName, Gathered] = {}
        hidden: set[tuple[str, str]] = set()
        for page in pages:
            for key, series in page.allocations.items():
                if series.info.get("source") == PROCESS_SOURCE:
                    continue  # published for people only: without a process, whether it holds the GPU is unknown
                if is_hidden(series.labels) or is_hidden(series.info):
                    hidden.add((series.labels.get("uuid", ""), series.labels.get("mig_uuid", "")))
                    continue
                holder = holders.setdefault(holder_name(series.labels), Gathered())
                holder.add(series.info, self._unit(page, key, series, wall))
                count = series.values.get("gpu_allocation_holder_units")
                if count is not None:
                    holder.count(count)
        allocations = sum(len(page.allocations) for page in pages)
        found = tuple(holder.evidence(name) for name, holder in holders.items())
        unseen = self._unseen(pages, wall)
        return Evidence(wall, found, len(pages), allocations, tuple(problems), len(hidden), unseen=unseen)

    def _unseen(self, pages: Sequence[_Page], wall: float) -> tuple[Unseen, ...]:
        """Remembers the holders of these pages. Returns those of exporters that are silent now, but answered lately."""
        for page in pages:
            self._shown[page.node] = (
                wall,
                {
                    key: Unseen(page.node, holder_name(series.labels), series.incarnation)
                    for key, series in page.allocations.items()
                    if series.info.get("source") != PROCESS_SOURCE and not is_hidden(series.labels | series.info)
                },
            )
        self._shown = {node: shown for node, shown in self._shown.items() if wall - shown[0] <= SEEN_S}
        seen = {key for page in pages for key in page.allocations}
        silent = self._shown.keys() - {page.node for page in pages}
        shown = (item for node in silent for item in self._shown[node][1].items())
        return tuple(sorted({unseen for key, unseen in shown if key not in seen and unseen.name.name}))

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        """See EvidenceSource.read_holders. Reads every exporter, even for few holders."""
        evidence = self.read_evidence(names)
        return evidence._replace(holders=tuple(each for each in evidence.holders if each.name in names))

    def find_holders(self, unit_of: Callable[[Mapping[str, str], str], str]) -> Collection[tuple[HolderName, str]]:
        """See ExplainingSource.find_holders. Reads every exporter."""
        found = (
            (series.labels, unit_of(series.labels, address.place))
            for address, page in self._read_pages().items()
            if isinstance(page, _Page)
            for series in page.allocations.values()
            if not is_hidden(series.info)
        )
        return sorted({(holder_name(labels), unit) for labels, unit in found if unit})

    def read_other_activity(self, uuids: Collection[str]) -> OtherActivity:
        """See ExplainingSource.read_other_activity. Always empty, because exporters keep no past values."""
        return {}

    def read_waiting(self, name: HolderName) -> Mapping[str, float]:
        """See ExplainingSource.read_waiting. Always empty, because exporters do not know the waiting pods and jobs."""
        return {}

    def read_gaps(self) -> Sequence[str]:
        """See ExplainingSource.read_gaps. Always empty: Evidence.problems already lists silent exporters."""
        return ()

    def read_last_seen(self, name: HolderName) -> float | None:
        """See ExplainingSource.read_last_seen. Always None, because exporters keep no past values."""
        return None

    def read_use(self, name: HolderName, units: Collection[UnitEvidence]) -> UseOfUnits:
        """See ExplainingSource.read_use. Reads the status pages of these units' exporters; omits silent exporters."""
        nodes, uuids = {unit.node for unit in units}, {unit.uuid for unit in units}
        addresses = [address for address in self._addresses if address.place in nodes]

        def read(address: Address) -> UseOfUnits:
            with contextlib.suppress(AnswerError):
                return parse_use(self._fetch(address.at(STATUS)), name, uuids)
            return {}

        found: dict[tuple[str, str], UnitUse] = {}
        with contextlib.suppress(NoThread):
            for use in run_ahead(read, addresses, FETCHES, "use"):
                found |= use
        return found

    def _read_pages(self) -> dict[Address, _Page | AnswerError]:
        """Returns the answer of each exporter, in the order of the exporters.

        The threads are daemons, and nothing joins them. A thread that waits for a slow exporter ends with its request.
        """
        addresses: queue.SimpleQueue[Address] = queue.SimpleQueue()
        for address in self._addresses:
            addresses.put(address)
        answers: queue.SimpleQueue[tuple[Address, _Page | AnswerError]] = queue.SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                try:
                    address = addresses.get_nowait()
                except queue.Empty:
                    return
                answers.put((address, self._read_page(address)))

        until = time.monotonic() + self._within_s
        for _ in range(min(FETCHES, len(self._addresses))):
            try:
                start(threading.Thread(target=work, name="fetch", daemon=True))
            except NoThread as exc:
                raise AnswerError(str(exc)) from exc
        found: dict[Address, _Page | AnswerError] = {}
        while len(found) < len(self._addresses):
            try:
                address, page = answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            found[address] = page
        is_over.set()
        reason = f"no answer within the {self._within_s:g} s of a cycle"
        return {each: found.get(each) or AnswerError(f"{each}: {reason}") for each in self._addresses}

    def _read_page(self, address: Address) -> _Page | AnswerError:
        try:
            return _Page(address, self._fetch(address), self._clock.wall())
        except AnswerError as exc:
            return exc
        except Exception as exc:  # an unexpected page must not cost the evidence of other exporters
            return AnswerError(f"{address}: {type(exc).__name__}: {exc}")

    def _unit(self, page: _Page, key: Key, series: _AllocationSeries, wall: float) -> UnitEvidence:
        values = series.values
        ratio = self._host_work((page.node, *key), "gpu_allocation_host_activity_ratio", values, wall)
        cpus = self._host_work((page.node, *key), "gpu_allocation_host_cpus", values, wall)
        active = values.get("gpu_allocation_last_active_timestamp_seconds")
        cores = None if ratio is None or cpus is None or not ratio * cpus >= CORE else ratio * cpus
        return UnitEvidence(
            node=page.node,
            gpu=series.labels.get("gpu", ""),
            uuid=series.labels.get("uuid", ""),
            mig=series.labels.get("mig", ""),
            start_wall=values.get("gpu_allocation_start_timestamp_seconds"),
            idle_run_s=values.get("gpu_allocation_idle_run_seconds"),
            sample_age_s=None if page.last_sample is None else page.wall - page.last_sample,
            coverage=self._coverage(page.node, key, series, wall),
            witnesses=_whole(values.get("gpu_allocation_idle_run_witnesses")),
            sample_interval_s=page.sample_interval_s,
            model=page.models.get(series.labels.get("uuid", ""), ""),
            longest_gap_s=values.get("gpu_allocation_idle_gap_longest_seconds", 0.0),
            host_cpu_ratio=ratio,
            host_io_bytes_per_s=self._host_work(
                (page.node, *key), "gpu_allocation_host_io_bytes_per_second", values, wall
            ),
            host_cores=cores,
            host_cpus=cpus,
            obstacle=series.obstacle,
            stalled_run_s=values.get("gpu_allocation_stalled_run_seconds"),
            causes=series.causes,
            seen_s=values.get("gpu_allocation_held_seconds_total"),
            quiet_s=None if active is None else page.wall - active,
            host_work_age_s=self._age(self._worked, (page.node, *key), self._works(series), wall),
            cores_age_s=self._age(self._used, (page.node, *key), cores is not None, wall),
        )

    def _works(self, series: _AllocationSeries) -> bool:
        """Returns whether a holder works outside its GPUs now."""
        if self._limits is None or any(cause.name in WORK_ELSEWHERE for cause in series.causes):
            return self._limits is not None
        cpu, io = (series.values.get(f"gpu_allocation_host_{name}", 0.0) for name in HOST_WORK)
        return cpu > self._limits.cpu_ratio or io > self._limits.io_bytes_per_s

    def _age(self, times: dict[Key, float], key: Key, now: bool, wall: float) -> float | None:
        """Seconds since `key` was last true, None if never. `now`: it is true at `wall`, which `times` notes."""
        if now and self._limits is not None:
            times[key] = wall
        return wall - times[key] if key in times else None

    def _host_work(self, key: Key, name: str, values: Mapping[str, float], wall: float) -> float | None:
        """Returns the value on the page, else the last known value if it is at most HOST_KEEP_S old, else None."""
        place = (*key, name)
        if name in values:
            self._host[place] = wall, values[name]
        when, value = self._host.get(place, (-math.inf, 0.0))
        return value if wall - when <= HOST_KEEP_S else None

    def _coverage(self, node: str, key: Key, series: _AllocationSeries, wall: float) -> float | None:
        held = series.values.get("gpu_allocation_held_seconds_total")
        observed = series.values.get("gpu_allocation_observed_seconds_total")
        if held is None or observed is None:
            return None
        return self._counters.setdefault((node, *key), Counters()).cover(self._window_s, held, observed, wall)

    def _forget(self, pages: Sequence[_Page], wall: float) -> None:
        """Drops the samples of holders that are gone. Keeps the samples of exporters that do not answer now."""
        nodes = {page.node for page in pages}
        keys = {(page.node, *key) for page in pages for key in page.allocations}
        self._host = {key: value for key, value in self._host.items() if wall - value[0] <= HOST_KEEP_S}
        kept_s = self._limits.kept_s if self._limits is not None else 0.0
        self._worked, self._used = (
            {key: when for key, when in times.items() if wall - when <= kept_s} for times in (self._worked, self._used)
        )
        self._counters = {
            key: value
            for key, value in self._counters.items()
            if key in keys or (key[0] not in nodes and wall - value.last_wall < self._window_s)
        }


@dataclass(slots=True)
class _AllocationSeries:
    labels: dict[str, str]
    info: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    obstacle: str = ""
    causes: tuple[PublishedCause, ...] = ()

    @property
    def incarnation(self) -> str:
        """The pod's UID, or the job's start in whole Unix seconds; "" if unknown."""
        start = self.values.get("gpu_allocation_start_timestamp_seconds")
        return self.info.get("pod_uid", "") or (f"{start:.0f}" if start and self.labels.get("job_id") else "")


class _Page:
    """The metrics of one exporter, grouped by allocation."""

    def __init__(self, address: Address, text: str, wall: float) -> None:
        self._address = address
        self.node = address.place
        self.wall = wall
        self.last_sample: float | None = None
        self.sample_interval_s = 1.0
        self.allocations: dict[Key, _AllocationSeries] = {}
        self.models: dict[str, str] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        self._take(sample.name, dict(sample.labels), sample.value)
        except (ValueError, LookupError, RecursionError) as exc:
            raise AnswerError(f"{address}: not in the Prometheus text format") from exc  # quotes nothing of it

    def _take(self, name: str, labels: dict[str, str], value: float) -> None:
        if name == "gpu_exporter_last_sample_timestamp_seconds":
            self.last_sample = value
        elif name == "gpu_exporter_sample_interval_seconds":
            self.sample_interval_s = value
        elif name == "gpu_info":
            self.models[labels.get("uuid", "")] = labels.get("name", "")
        elif name.startswith("gpu_allocation_"):
            refuse_renamed(labels, str(self._address))
            key = tuple(labels.get(label, "") for label in ALLOCATION_KEY)
            allocation = self.allocations.setdefault(key, _AllocationSeries(labels))
            if name == "gpu_allocation_info":
                allocation.info = labels
            elif name == "gpu_allocation_activity_unknown":
                allocation.obstacle = obstacle_of(labels)
            elif name == "gpu_allocation_cause":
                allocation.causes = (*allocation.causes, *cause_of(labels))[:CAUSES_MAX]
            elif name in allocation.values and name in MORE_CAREFUL:
                allocation.values[name] = MORE_CAREFUL[name](allocation.values[name], value)
            else:
                allocation.values[name] = value


def _whole(value: float | None) -> int | None:
    return None if value is None else math.floor(value)
