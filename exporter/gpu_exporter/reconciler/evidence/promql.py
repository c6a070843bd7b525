"""Reads evidence from any PromQL API: Prometheus, Thanos, Mimir, VictoriaMetrics.

The first query selects only holders with long idle runs, so its answer is short. Four instant queries then read all
series of these holders, in batches that fit into a query.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import ANSWER_S, MIB, MOST_BYTES, fetch_text
from gpu_exporter.common.model.holders import ALLOCATION_KEY
from gpu_exporter.common.model.readings import CORE
from gpu_exporter.common.outside import WHOLE_MAX, whole
from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.common.promql import absence
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import VectorRow, cluster_matchers, literal, parse_vector, quote
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.evidence.clocks import LATENT_MAX_S, ahead_of, describe_disagreement
from gpu_exporter.reconciler.evidence.coverage import coverage
from gpu_exporter.reconciler.evidence.matchers import HOLDER_LABELS, MATCHER_MAX, restrict
from gpu_exporter.reconciler.evidence.pause_expression import Pause, Pauses
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.records import (
    CAUSES_MAX,
    ENFORCED,
    EVIDENCE_S,
    HOST_KEEP_S,
    MORE_CAREFUL,
    WORK_ELSEWHERE,
    Evidence,
    Gathered,
    HolderEvidence,
    HolderName,
    HostLimits,
    OtherActivity,
    PublishedCause,
    UnitEvidence,
    UseOfUnits,
    cause_of,
    holder_name,
    is_hidden,
    obstacle_of,
    refuse_renamed,
    refuse_several,
)
from gpu_exporter.reconciler.evidence.unseen import read_unseen
from gpu_exporter.reconciler.evidence.use import SERIES, SUMS, collect_use
from gpu_exporter.reconciler.evidence.usual import Usual, read_days

PEAKS_S = 10.0  # time limit for Peaks once an hour, in addition to the time of a cycle
UNSEEN_S = 10.0  # time limit for the holders of silent exporters, in addition to the time of a cycle
WORKERS = 3  # parallel queries: the server works on some while another answer is parsed
EXPLAINED_MAX = 200  # GPUs of one holder whose witnesses are asked for, so that the query stays short
MODELS_BATCH = 250  # GPUs whose model is asked for in one query: at 40 characters each, below MATCHER_MAX
MODELS_MAX = 200_000  # GPUs whose model is remembered
ABSENCE_S = 600.0  # how long the reason for missing series counts: finding it costs more than a cycle
HOLDER_BYTES = 1024  # bytes of an answer per holder that it may name
PREFIX = "gpu_allocation_"
LAST_ACTIVE = "last_active_timestamp_seconds"
FACTS = (
    "idle_run_seconds",
    "start_timestamp_seconds",
    "held_seconds_total",
    "observed_seconds_total",
    "idle_run_witnesses",
    "info",
    "holder_units",
    "idle_gap_longest_seconds",
    "activity_unknown",
    "stalled_run_seconds",
    "cause",
    LAST_ACTIVE,
)
HOST_WORK = ("gpu_allocation_host_activity_ratio", "gpu_allocation_host_io_bytes_per_second")  # as in HostLimits
HOST_CPUS = "gpu_allocation_host_cpus"
CORES = "cores"  # the CPU cores that a holder uses
HOST_LAST = "last"  # the time of the last work outside the GPUs (Unix seconds)
HOST_STEP_S = 60.0  # between two moments at which that time is looked for; the values are means of ten minutes
WITNESS = re.compile(r"[a-z0-9_]{1,40}")
UnitKey: TypeAlias = tuple[str, ...]
Place: TypeAlias = tuple[str, str]  # node and instance of an exporter
Series: TypeAlias = frozenset[tuple[str, str]]  # every label of one series
NO_LABELS = ("",) * len(ALLOCATION_KEY)
COUNTERS = ("held_seconds_total", "observed_seconds_total")


T = TypeVar("T")
Facts: TypeAlias = dict[str, list[VectorRow]]
# The rows of each of FACTS; the growth of COUNTERS over the window; rows by HOST_WORK, HOST_CPUS, CORES and HOST_LAST.
Batch: TypeAlias = tuple[Facts, Facts, Facts]


class PromQLOptions(NamedTuple):
    """The API to query, and the scope of the queries.

    `matcher`: label matchers for every selector, e.g. `cluster="a"`.
    `asks_models`: also reads the model of each GPU.
    `host`: also reads work on the host above these limits; None to ignore it.
    `at`: the time of the evidence (Unix seconds); None for the present time.
    """

    address: Address
    candidate_after_s: float
    window_s: float
    matcher: str = ""
    asks_models: bool = False
    host: HostLimits | None = None
    at: float | None = None


class PromQLSource:
    """Reads evidence from one PromQL API."""

    def __init__(
        self,
        options: PromQLOptions,
        clock: Clock,
        fetch: Fetch = fetch_text,
        pauses: Pauses | None = None,
        peaks: Peaks | None = None,
        find_monitors: absence.FindMonitors | None = None,
    ) -> None:
        """`pauses`: None if the site has no `policy.pause_when`. `peaks`: finds pods that could share their GPUs; None
        to find no pods. `find_monitors`: called if Prometheus has no target; None without a cluster.
        """
        self._find_monitors = find_monitors
        self._absence: tuple[float, str] | None = None  # when it was asked for (monotonic), and the reason
        self._at = options.at
        self._models: dict[str, str] | None = {} if options.asks_models else None
        self._pauses = pauses
        self._host = options.host
        self._peaks = peaks
        self._address = options.address
        self._candidate_after_s = options.candidate_after_s
        self._window_s = options.window_s
        self._clock = clock
        self._matcher = options.matcher
        self._fetch = fetch
        self._until = 0.0
        self._usual = Usual(lambda hour: read_days(self, hour, options.candidate_after_s), clock)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        """Reads the evidence on the holders with a long idle run, and on the holders in `marked`."""
        evidence = self._read_evidence(marked)
        self._until = time.monotonic() + UNSEEN_S
        try:
            evidence = evidence._replace(unseen=read_unseen(self))
        except AnswerError as exc:  # it must not cost the evidence of the exporters that report
            why = f"it is unknown which exporters are missing: {exc}"
            evidence = evidence._replace(problems=(*evidence.problems, why))
        if self._peaks is not None:  # last, with its own time limit: a hint must not cost evidence
            self._until = time.monotonic() + PEAKS_S
            self._peaks.renew(self)
        return evidence

    def _read_evidence(self, marked: Collection[HolderName]) -> Evidence:
        wall = self._clock.wall()
        self._until = time.monotonic() + EVIDENCE_S
        allocations = self._count("gpu_allocation_info")
        suspects = self.query(self._suspects(), MIB + HOLDER_BYTES * allocations)
        refuse_several({row.labels.get("cluster", "") for row in suspects}, "the source returned series")
        exporters = self._count("gpu_exporter_build_info")
        if not exporters:
            raise AnswerError(self._explain_absence(wall))
        self._absence = None
        if self._count("gpu_up", 'namespace!=""'):
            raise AnswerError(ENFORCED)
        self._compare_clocks()
        hidden = self._count("gpu_allocation_info", 'identity="hidden"', "count by (uuid, mig_uuid) ")
        pause = self._pauses.read(self.query, wall) if self._pauses is not None else Pause()
        sharing = self._peaks.known if self._peaks is not None else {}
        names = {holder_name(row.labels) for row in suspects if not is_hidden(row.labels)}
        names |= self._resolve(marked) | sharing.keys()
        if not names:
            return Evidence(wall, (), exporters, allocations, hidden=hidden, paused=pause.now, usual_at=self._usual.at)
        found = self._read_holders(names, pause)
        return Evidence(
            wall,
            found,
            exporters,
            allocations,
            hidden=hidden,
            paused=pause.now,
            usual_at=self._usual.at,
            sharing=sharing,
        )

    def _explain_absence(self, wall: float) -> str:
        now = time.monotonic()
        if self._absence is None or now - self._absence[0] > ABSENCE_S:
            found = absence.explain_absence(self.query, self._matcher, wall, self._find_monitors)
            self._absence = now, str(found)
        return self._absence[1]

    def read_gaps(self) -> Sequence[str]:
        self._until = time.monotonic() + EVIDENCE_S
        gaps = absence.explain_gaps(self.query, self._matcher, self._clock.wall(), self._candidate_after_s)
        return [str(gap) for gap in gaps]

    def read_last_seen(self, name: HolderName) -> float | None:
        self._until = time.monotonic() + EVIDENCE_S
        found = (absence.last_seen(self.query, self.select("gpu_allocation_info", one)) for one in _matchers_of(name))
        return next((wall for wall in found if wall is not None), None)

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        wall = self._clock.wall()
        self._until = time.monotonic() + EVIDENCE_S
        pause = self._pauses.read(self.query, wall) if self._pauses is not None else Pause()
        return Evidence(wall, self._read_holders(names, pause), paused=pause.now)

    def _read_holders(self, names: Collection[HolderName], pause: Pause) -> tuple[HolderEvidence, ...]:
        wall = self._clock.wall()
        last = self.select("gpu_exporter_last_sample_timestamp_seconds")
        ages = self._by_exporter(f"time() - min by (node, instance) ({last})")
        interval = self.select("gpu_exporter_sample_interval_seconds")
        intervals = self._by_exporter(f"min by (node, instance) ({interval})")
        holders: dict[HolderName, Gathered] = {}
        used = self._last_use_of_cores(names)
        for facts, growth, host in self._read_batches(self._read_batch, restrict(names)):
            starts = _by_unit(facts, "start_timestamp_seconds")
            runs = _by_unit(facts, "idle_run_seconds")
            witnesses = _by_unit(facts, "idle_run_witnesses")
            stalls = _by_unit(facts, "stalled_run_seconds")
            gaps = _by_unit(facts, "idle_gap_longest_seconds")
            seen = _by_unit(facts, "held_seconds_total")
            shares = self._coverage(facts, growth)
            obstacles = {_unit_key(row.labels): obstacle_of(row.labels) for row in facts["activity_unknown"]}
            causes: dict[UnitKey, tuple[PublishedCause, ...]] = {}
            for row in facts["cause"]:
                key = _unit_key(row.labels)
                causes[key] = (*causes.get(key, ()), *cause_of(row.labels))[:CAUSES_MAX]
            cpu, io = (_more_careful(name, host[name]) for name in HOST_WORK)
            active = _by_unit(facts, LAST_ACTIVE)
            worked = _more_careful(PREFIX + LAST_ACTIVE, host[HOST_LAST])
            cores, cpus = (_more_careful(HOST_CPUS, host[name]) for name in (CORES, HOST_CPUS))
            models = self._read_models({row.labels.get("uuid", "") for row in facts["info"]})
            for row in facts["info"]:
                name, key = holder_name(row.labels), _unit_key(row.labels)
                if name not in names:
                    continue
                holders.setdefault(name, Gathered()).add(
                    row.labels,
                    UnitEvidence(
                        node=row.labels.get("node") or row.labels.get("instance", ""),
                        gpu=row.labels.get("gpu", ""),
                        uuid=row.labels.get("uuid", ""),
                        mig=row.labels.get("mig", ""),
                        start_wall=starts.get(key),
                        idle_run_s=runs.get(key),
                        sample_age_s=ages.get(_place(row.labels)),
                        coverage=shares.get(key),
                        witnesses=math.floor(witnesses[key]) if key in witnesses else None,
                        sample_interval_s=intervals.get(_place(row.labels), 1.0),
                        host=row.labels.get("node", ""),
                        model=models.get(row.labels.get("uuid", ""), ""),
                        longest_gap_s=gaps.get(key, 0.0),
                        host_cpu_ratio=cpu.get(key),
                        host_io_bytes_per_s=io.get(key),
                        host_cores=cores.get(key),
                        host_cpus=cpus.get(key),
                        obstacle=obstacles.get(key, ""),
                        stalled_run_s=stalls.get(key),
                        causes=causes.get(key, ()),
                        seen_s=seen.get(key),
                        quiet_s=wall - active[key] if key in active else None,
                        host_work_age_s=max(0.0, wall - worked[key]) if key in worked else None,
                        cores_age_s=max(0.0, wall - used[key]) if key in used else None,
                    ),
                )
            for row in facts["holder_units"]:
                name = holder_name(row.labels)
                if name in holders:
                    holders[name].count(row.value)
        return tuple(holder.evidence(name)._replace(counts_from=pause.until_wall) for name, holder in holders.items())

    def find_holders(self, unit_of: Callable[[Mapping[str, str], str], str]) -> Collection[tuple[HolderName, str]]:
        """See ExplainingSource.find_holders. Reads one series for each allocation."""
        self._until = time.monotonic() + EVIDENCE_S
        rows = [row.labels for row in self.query(self.select("gpu_allocation_info")) if not is_hidden(row.labels)]
        found = ((labels, unit_of(labels, labels.get("instance", ""))) for labels in rows)
        return sorted({(holder_name(labels), unit) for labels, unit in found if unit})

    def read_waiting(self, name: HolderName) -> Mapping[str, float]:
        """See ExplainingSource.read_waiting. Reads the recording rules of the fleet."""
        self._until = time.monotonic() + EVIDENCE_S
        clusters = cluster_matchers(self._matcher)
        found: dict[str, float] = {}
        for of_it in restrict([name]):
            matchers = [of_it, *clusters]
            if name.scheduler != "slurm":
                matchers.append(f'namespace="{quote(name.namespace)}"')
            pools = f"group by (cluster, pool) (allocation:gpu_pool:info{{{','.join(matchers)}}})"
            waiting = f"pool:gpu_pending_gpus:sum{{{','.join(clusters)}}} and on (cluster, pool) {pools}"
            for row in self.query(f"max by (pool) ({waiting})"):
                found[one_line(row.labels.get("pool", ""), REASON_MAX)] = row.value
        return found

    def read_use(self, name: HolderName, units: Collection[UnitEvidence]) -> UseOfUnits:
        """See ExplainingSource.read_use. Uses the texts of meanings.py. Means begin when the youngest of `units` was
        allocated, because an earlier holder of these GPUs may have had the same name.
        """
        self._until = time.monotonic() + EVIDENCE_S
        rows: list[VectorRow] = []
        sums: dict[str, list[VectorRow]] = {name: [] for name in SUMS}
        held_s = [self._clock.wall() - unit.start_wall for unit in units if unit.start_wall is not None]
        over_s = max(0, math.floor(min([self._candidate_after_s, *held_s])))
        for matchers in _matchers_of(name):
            rows += self.query(self.select("", f'__name__=~"{PREFIX}({"|".join(SERIES)})"', matchers))
            parts = {"{which}": self.select("", matchers), "{all}": self.select(""), "{window}": f"{over_s}s"}
            for each, text in SUMS.items() if over_s > 0 else ():
                for part, filled in parts.items():
                    text = text.replace(part, filled)
                sums[each] += self.query(text)
        return collect_use(rows, sums, f"in the last {describe_duration(over_s)}")

    def read_other_activity(self, uuids: Collection[str]) -> OtherActivity:
        """See ExplainingSource.read_other_activity. Reads at most EXPLAINED_MAX GPUs."""
        self._until = time.monotonic() + EVIDENCE_S
        wanted = f'uuid=~"{"|".join(map(literal, sorted(uuids)[:EXPLAINED_MAX]))}"'
        found: dict[tuple[str, str], dict[str, float]] = {}
        for metric in ("gpu_other_activity_seconds_total", "gpu_mig_other_activity_seconds_total"):
            total, window = self.select(metric, wanted), f"{self._candidate_after_s:g}s"
            # A series begins with the first such second, which increase() cannot see.
            grown = f"(increase({total}[{window}]) > 0) or ({total} unless {total} offset {window})"
            for row in self.query(f"max by (uuid, mig, witness) ({grown})"):
                unit, witness = (row.labels.get("uuid", ""), row.labels.get("mig", "")), row.labels.get("witness", "")
                if WITNESS.fullmatch(witness):  # the name is printed
                    found.setdefault(unit, {})[witness] = row.value
        return found

    def _read_models(self, uuids: Collection[str]) -> Mapping[str, str]:
        """Returns the models of these GPUs, if wanted. Each model is read only once, because it does not change."""
        if self._models is None:
            return {}
        unknown = sorted(set(uuids) - self._models.keys())
        if len(self._models) + len(unknown) > MODELS_MAX:
            self._models.clear()
            unknown = sorted(uuids)
        for start in range(0, len(unknown), MODELS_BATCH):
            wanted = f'uuid=~"{"|".join(map(literal, unknown[start : start + MODELS_BATCH]))}"'
            rows = self.query(f"count by (uuid, name) ({self.select('gpu_info', wanted)})")
            self._models |= {row.labels.get("uuid", ""): row.labels.get("name", "") for row in rows}
        return self._models

    def _by_exporter(self, query: str) -> dict[Place, float]:
        return {_place(row.labels): row.value for row in self.query(query)}

    def _read_batches(self, read: Callable[[str], T], batches: Iterable[str]) -> Iterator[T]:
        """Reads several batches in parallel: the server works on one while the reconciler parses another.

        Raises AnswerError.
        """
        try:
            yield from run_ahead(read, batches, WORKERS, "evidence")
        except NoThread as exc:
            raise AnswerError(str(exc)) from exc

    def _read_batch(self, wanted: str) -> Batch:
        facts = self._facts(wanted)
        growth = {
            counter: self._unnamed(f"increase({self.select(PREFIX + counter, wanted)}[{self._window_s:g}s])")
            for counter in COUNTERS
        }
        return facts, growth, self._host_work(wanted)

    def _host_work(self, wanted: str) -> Facts:
        """Reads the work on the host of every holder above a limit, and when a holder last worked outside its GPUs.

        Each query has one selector: with two of them, a query could be too long for the source.
        """
        found: Facts = {name: [] for name in (*HOST_WORK, HOST_CPUS, CORES, HOST_LAST)}
        if self._host is None:
            return found
        ratio, io = HOST_WORK
        for name, limit in ((ratio, ""), (io, f" > {self._host.io_bytes_per_s:g}"), (HOST_CPUS, "")):
            found[name] = self._unnamed(f"last_over_time({self.select(name, wanted)}[{HOST_KEEP_S:g}s]){limit}")
        found[CORES] = _cores(found[HOST_CPUS], found[ratio])
        found[ratio] = [row for row in found[ratio] if row.value > self._host.cpu_ratio]
        if self._host.kept_s:
            work = [self.select("gpu_allocation_cause", f'cause=~"{"|".join(sorted(WORK_ELSEWHERE))}"', wanted)]
            limits = zip(HOST_WORK, self._host[:2], strict=True)
            work += [f"{self.select(name, wanted)} > {limit:g}" for name, limit in limits]
            found[HOST_LAST] = [row for each in work for row in self._last_time(each)]
        return found

    def _unnamed(self, query: str) -> list[VectorRow]:
        """Returns the rows without the name of their metric, which some functions keep, and others drop."""
        rows = self.query(query)
        for row in rows:
            row.labels.pop("__name__", None)
        return rows

    def _last_use_of_cores(self, names: Collection[HolderName]) -> dict[UnitKey, float]:
        """When these holders last used CORE or more CPU cores (Unix seconds). Its queries have two selectors each."""
        if self._host is None or not self._host.kept_s:
            return {}

        def read(wanted: str) -> list[VectorRow]:
            cores = " * ".join(self.select(name, wanted) for name in (HOST_CPUS, HOST_WORK[0]))
            return self._last_time(f"{cores} >= {CORE:g}")

        rows = chain.from_iterable(self._read_batches(read, restrict(names, MATCHER_MAX // 2)))
        return _more_careful(PREFIX + LAST_ACTIVE, rows)

    def _last_time(self, selected: str) -> list[VectorRow]:
        """When each allocation last had such a series, within the last `kept_s` of HostLimits (Unix seconds)."""
        kept_s = 0.0 if self._host is None else self._host.kept_s
        times = f"max_over_time(timestamp({selected})[{kept_s:g}s:{HOST_STEP_S:g}s])"
        return self.query(f"max by ({', '.join(ALLOCATION_KEY)}) ({times})")

    def _facts(self, wanted: str) -> Facts:
        facts: Facts = {fact: [] for fact in FACTS}
        for row in self.query(self.select("", f'__name__=~"{PREFIX}({"|".join(FACTS)})"', wanted)):
            fact = row.labels.pop("__name__", "").removeprefix(PREFIX)
            if fact in facts:
                facts[fact].append(row)
        return facts

    def _count(self, metric: str, wanted: str = "", distinct: str = "") -> int:
        selected = self.select(metric, wanted)
        rows = self.query(f"count({distinct}({selected}))" if distinct else f"count({selected})")
        return math.floor(rows[0].value) if rows else 0

    def _suspects(self) -> str:
        runs = self.select("gpu_allocation_idle_run_seconds")
        long = f"{runs} >= {self._candidate_after_s:g}"
        # Restarts and unknown time end idle runs, but not the time without work.
        active = self.select(PREFIX + LAST_ACTIVE)
        quiet = f"({runs} and time() - {active} >= {self._window_s:g})"
        stalled = f"{self.select('gpu_allocation_stalled_run_seconds')} > 0"
        return f"max by ({', '.join(HOLDER_LABELS)}) ({long} or {stalled} or {quiet})"

    def _coverage(self, facts: Facts, growth: Facts) -> dict[UnitKey, float | None]:
        """Observed share of the held time in the window, by unit. If a unit has several series, the smallest share
        counts.

        The share is computed per series, as in the alert. Two targets for one unit began at different times, so the
        increase of one does not fit the total of the other. A target that ended within the window counts with its
        observed part. The samples in Prometheus show how far back each series goes.
        """
        held_in, observed_in = ({_series(row.labels): row.value for row in growth[counter]} for counter in COUNTERS)
        held, observed = (
            grown | {_series(row.labels): row.value for row in facts[counter]}
            for counter, grown in zip(COUNTERS, (held_in, observed_in), strict=True)
        )
        shares: dict[UnitKey, float | None] = {}
        for series in held.keys() | observed.keys():
            share = None
            if series in held and series in observed:
                increases = held_in.get(series, 0.0), observed_in.get(series, 0.0)
                share = coverage(self._window_s, held[series], observed[series], *increases)
            key = _unit_key(dict(series))
            before = shares.get(key, share)
            shares[key] = None if share is None or before is None else min(share, before)
        return shares

    def _resolve(self, marked: Collection[HolderName]) -> set[HolderName]:
        """These names, plus Slurm's own id for each job with an id such as 3010_1 or 3011+1."""
        names = set(marked)
        for name in marked:
            if name.scheduler != "slurm" or whole(name.name, WHOLE_MAX) is not None:
                continue
            kind = ("array_job_id", "array_task_id") if "_" in name.name else ("het_job_id", "het_job_offset")
            parts = re.split("[_+]", name.name)
            matchers = (f'{label}="{quote(part)}"' for label, part in zip(kind, parts, strict=False))
            names |= {holder_name(row.labels) for row in self.query(self.select("gpu_allocation_info", *matchers))}
        return names

    def select(self, metric: str, *wanted: str) -> str:
        return f"{metric}{{{','.join(part for part in (self._matcher, *wanted) if part)}}}"

    def _compare_clocks(self) -> None:
        """Raises AnswerError if the clocks of the reconciler and of Prometheus disagree."""
        if self._at is not None:  # for a past time there is no clock to compare
            return
        asked = self._clock.wall()
        for row in self.query("vector(time())"):
            ahead_s = ahead_of(row.value, asked, self._clock.wall())
            if fault := describe_disagreement(ahead_s, f"Prometheus ({self._address})", LATENT_MAX_S):
                raise AnswerError(fault)

    def query(self, query: str, most_bytes: int = MOST_BYTES, at: float | None = None) -> list[VectorRow]:
        """See Asked.query. Keeps the time limit of a cycle. `most_bytes`: limit of the answer."""
        left_s = self._until - time.monotonic()
        if left_s <= 0.0:
            raise AnswerError(f"{self._address}: the evidence of a cycle took longer than {EVIDENCE_S:g} s")
        at = self._at if at is None else at
        form = {"query": query} if at is None else {"query": query, "time": f"{at:.3f}"}
        text = self._fetch(self._address.page("/api/v1/query"), form, most_bytes, min(ANSWER_S, left_s))
        rows = parse_vector(text, query)
        for row in rows:
            refuse_renamed(row.labels, query)
        return rows


def _matchers_of(name: HolderName) -> Iterator[str]:
    """Matchers for the series of exactly this holder."""
    for of_it in restrict([name]):
        yield of_it if name.scheduler == "slurm" else f'{of_it},namespace="{quote(name.namespace)}"'


def _by_unit(facts: Facts, fact: str) -> dict[UnitKey, float]:
    return _more_careful(PREFIX + fact, facts[fact])


def _more_careful(metric: str, rows: Iterable[VectorRow]) -> dict[UnitKey, float]:
    """Returns the value of each unit. If a unit has two series, the value that makes a mark less likely counts."""
    worst = MORE_CAREFUL[metric]
    values: dict[UnitKey, float] = {}
    for row in rows:
        key = _unit_key(row.labels)
        values[key] = worst(values[key], row.value) if key in values else row.value
    return values


def _cores(cpus: Iterable[VectorRow], ratios: Iterable[VectorRow]) -> list[VectorRow]:
    """Returns the CPU cores in use, if CORE or more: the number of CPUs times the share in use, of the same series."""
    shares = {_series(row.labels): row.value for row in ratios}
    cores = (VectorRow(row.labels, row.value * shares.get(_series(row.labels), 0.0)) for row in cpus)
    return [row for row in cores if row.value >= CORE]


def _place(labels: dict[str, str]) -> Place:
    return labels.get("node", ""), labels.get("instance", "")


def _unit_key(labels: dict[str, str]) -> UnitKey:
    return tuple(map(labels.get, ALLOCATION_KEY, NO_LABELS))


def _series(labels: dict[str, str]) -> Series:
    """Returns the labels that identify a series within its metric."""
    return frozenset(labels.items())
