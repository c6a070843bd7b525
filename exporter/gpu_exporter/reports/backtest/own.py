"""Finds idle times in gpu-exporter's own series.

The agent keeps counting while Prometheus does not scrape, so these idle runs have no gaps.
`gpu_allocation_idle_run_seconds` is read in windows of PART_S. The value at a window's end shows when the run began.
The largest value of the next window shows how long the run became.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.model.holders import ALLOCATION_KEY
from gpu_exporter.common.model.readings import WITNESSES_MIN
from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reconciler.evidence.records import FACTS, WORK_ELSEWHERE, owner_of, users_id_of
from gpu_exporter.reports.backtest.gauges import best_series, see_hour
from gpu_exporter.reports.backtest.lives import HolderLife
from gpu_exporter.reports.backtest.spans import extend, merge
from gpu_exporter.reports.backtest.tracks import MISSED, PART_S, Board, Key, UnitTrack
from gpu_exporter.reports.history.asking import Answers, History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.cells import WINDOW_S, HolderId, Unit
from gpu_exporter.reports.usage.sources.intervals import ask_targets, read_intervals, target_of

NAME = "gpu-exporter"
UTILIZATION = "gpu_allocation_utilization_ratio"
RUN, INFO, UP = "gpu_allocation_idle_run_seconds", "gpu_allocation_info", "gpu_up"
SEEN_S = 300.0  # a run this long is read; every run of SHORT_S has it at the end of some window
LOST_S = 30.0  # unobserved seconds of a window that count
NEAR_S = 90.0  # between the last activity and the end of a run that it ended: a scrape, and the clock of another host
BY = ", ".join(("cluster", *ALLOCATION_KEY))


class OwnTracks:
    """Collects the tracks of gpu-exporter's allocations. `read` may raise AnswerError."""

    def __init__(self, history: History, matcher: str, policy: Policy) -> None:
        """`policy`: its limits of work on the host apply."""
        self._history, self._matcher, self._policy = history, matcher, policy
        self.tracks: dict[Key, UnitTrack] = {}
        self.starts: defaultdict[HolderId, set[float]] = defaultdict(set)
        self.units: dict[HolderId, float] = {}
        self.facts: dict[HolderId, dict[str, str]] = {}
        self._open: dict[Key, tuple[float, float]] = {}  # the last window and the start of a run that goes on
        self._has_begun = False

    def read(self, span: WindowSpan) -> None:
        """Adds the samples of `span`. Call it in the order of time."""
        models = self._whole("models", "gpu_info", span, "cluster, uuid, name")
        named = {(dict(labels).get("cluster", ""), dict(labels).get("uuid", "")): dict(labels) for labels in models}
        for metric in (INFO, UP):
            self._see(metric, named, span)
        for labels, start in self._whole("starts", "gpu_allocation_start_timestamp_seconds", span, BY).items():
            self.starts[_holder(labels)].add(start)
        for labels, units in self._whole("units", "gpu_allocation_holder_units", span, BY).items():
            self.units[_holder(labels)] = max(units, self.units.get(_holder(labels), 0.0))
        for labels, share in self._whole("shares", "gpu_allocation_share_ratio", span, BY).items():
            if (track := self.tracks.get(_key(labels))) is not None:
                track.share = share
        if not self._has_begun:
            self._has_begun = True
            self._begin(span.start)
        self._add_runs(span)

    def describe(self, life: HolderLife) -> None:
        """Adds to a life its number of units, its owner, and the values that policies match."""
        holder = HolderId(life.cluster, *life.name)
        units, facts = self.units.get(holder), self.facts.get(holder, {})
        life.held = None if units is None else round(units)
        life.owner, life.users_id = owner_of(facts), users_id_of(facts)
        life.incarnation = facts.get("pod_uid", "")
        life.facts = {fact: frozenset([facts.get(fact, "")]) for fact in FACTS}

    def mean(self, life: HolderLife, seconds: float) -> str:
        scheduler, namespace, name = life.name
        place = {"job_id": name} if scheduler == "slurm" else {"namespace": namespace, "pod": name}
        names = {"cluster": life.cluster, "scheduler": scheduler, **place}
        matchers = (f'{label}=~"{literal(text)}"' for label, text in names.items())
        return f"avg({over('avg', self._select(UTILIZATION, *matchers), seconds)})"

    def _see(self, metric: str, models: Mapping[tuple[str, str], Mapping[str, str]], span: WindowSpan) -> None:
        """Adds the times in which `metric` shows each holder (INFO) or each unit (UP)."""
        series = self._select(metric)
        counts = self._history.ask_table("count", over("count", series, span.window), span)
        if not counts:
            return
        tables = self._history.ask_tables(ask_targets(counts, span.window), span)
        intervals = read_intervals(self._history, series, counts, tables, span)
        found: dict[Key, list[Labels]] = {}
        is_partial = False
        for labels, values in counts.items():
            holder = _holder(labels) if metric == INFO else None
            found.setdefault((holder, _board(labels)), []).append(labels)
            by_hour = intervals[target_of(labels)]
            is_partial = is_partial or any(
                WINDOW_S - n * by_hour[at] > MISSED * by_hour[at] for at, n in values.items()
            )
        windows: Answers = {}
        if is_partial:
            parts = span._replace(window=PART_S)
            windows = self._history.ask_table("windows", over("count", series, PART_S), parts)
        boards: defaultdict[tuple[str, str], set[Board]] = defaultdict(set)
        for _, board in self.tracks:
            boards[board[:2]].add(board)
        for key, several in found.items():
            given = dict(several[-1])
            uuid, node = given.get("uuid", ""), given.get("node") or given.get("instance", "")
            model = models.get((given.get("cluster", ""), uuid), {}).get("name", "")
            unit = Unit(given.get("cluster", ""), node, uuid, given.get("mig_uuid", ""), "", model)
            if key[0] is not None:
                self.facts[key[0]] = given
            # A GPU that is seen shows its instances too.
            beside = {(None, board) for board in boards[key[1][:2]]} if key[0] is None else set()
            for each in sorted({key, *beside}, key=str):
                track = self.tracks.setdefault(each, UnitTrack(unit))
                for start, labels in best_series(several, counts):
                    interval = intervals[target_of(labels)][start]
                    track.interval_s = max(interval, track.interval_s)
                    see_hour(track, (start, counts[labels][start], interval), windows.get(labels, {}), {})

    def _begin(self, at: float) -> None:
        """Reads each holder's longest idle run that ended with work before the history begins."""
        query = f"max by ({BY}) ({self._select('gpu_allocation_idle_gap_longest_seconds')})"
        for labels, longest in self._history.ask_now("gaps", query, at):
            if (track := self.tracks.get(_key(labels))) is not None:
                track.longest_gap_s = longest

    def _add_runs(self, span: WindowSpan) -> None:
        run, last = self._select(RUN), self._select("gpu_allocation_last_active_timestamp_seconds")
        few = self._select("gpu_allocation_idle_run_witnesses")
        lost = " - ".join(
            f"increase({self._select(f'gpu_allocation_{name}_seconds_total')}[{PART_S:.0f}s])"
            for name in ("held", "observed")
        )
        long = f"{run} >= {SEEN_S:.0f}"
        policy = self._policy
        cpu, io = (self._select(f"gpu_allocation_host_{each}") for each in ("activity_ratio", "io_bytes_per_second"))
        cause = self._select("gpu_allocation_cause", f'cause=~"{"|".join(sorted(WORK_ELSEWHERE))}"')
        works = f"max by ({BY}) ({cpu} > {policy.host_busy_ratio} or {io} > {policy.host_busy_io} or {cause})"
        queries = {
            "starts of runs": f"max by ({BY}) (timestamp({run}) - {run} and {long})",
            "lengths of runs": f"min by ({BY}) ({over('max', run, PART_S)} >= {SEEN_S:.0f})",
            "last work": f"max by ({BY}) ({last} and {over('max', run, 2 * WINDOW_S)} >= {SEEN_S:.0f})",
            "doubts": f"max by ({BY}) (({long} unless {few} >= {WITNESSES_MIN}))",
            "lost": f"max by ({BY}) ({lost}) > {LOST_S:.0f}",
            "unknown": f"max by ({BY}) ({over('count', self._select(INFO), PART_S)}) unless on ({BY}) "
            f"max by ({BY}) ({over('count', run, PART_S)})",
            "host work": f"{works} and on ({BY}) max by ({BY}) ({long})",
        }
        tables = self._history.ask_tables(queries, span._replace(window=PART_S))
        found = {name: {_key(labels): values for labels, values in table.items()} for name, table in tables.items()}
        last_window = span.end - PART_S
        for key in self._open.keys() | found["starts of runs"].keys() & self.tracks.keys():
            of = {name: table.get(key, {}) for name, table in found.items()}
            self._add(key, of["starts of runs"], of["lengths of runs"], of["last work"], last_window)
        for name, number in (("doubts", 0), ("host work", 1), ("unknown", 2)):
            for key, values in found[name].items():
                if (track := self.tracks.get(key)) is not None:
                    for at in sorted(values):
                        extend((track.doubts, track.host_work, track.unknown)[number], at, at + PART_S)
        for key, values in found["lost"].items():
            if (track := self.tracks.get(key)) is not None:
                track.thin += [(at, at + min(PART_S, seconds)) for at, seconds in sorted(values.items())]

    def _add(
        self,
        key: Key,
        starts: Mapping[float, float],
        lengths: Mapping[float, float],
        active: Mapping[float, float],
        last: float,
    ) -> None:
        """Adds the idle runs of an allocation. `starts`, `lengths`, `active`: values at the end of a window, by the
        start of the window. `last`: the last window of this chunk; its runs may continue in the next chunk.
        """
        track = self.tracks[key]
        before = self._open.pop(key, None)
        for at, start in ([before] if before else []) + sorted(starts.items()):
            end = at + PART_S
            grown = end if end in starts else max(end, start + lengths.get(end, 0.0))
            if track.idle[0] and start < track.idle[0][-1][1]:  # the same run: unknown time in it moves its start
                start = track.idle[0][-1][0]
            track.add_idle([[(start, grown)]] * len(track.idle))
            if at == last:
                self._open[key] = at, start
            elif end not in starts:
                worked = max(active.get(window, 0.0) for window in (at, end, end + PART_S))
                if worked < grown - NEAR_S:
                    track.holes.append((grown, grown + PART_S))

    def _whole(self, name: str, metric: str, span: WindowSpan, by: str) -> dict[Labels, float]:
        series = self._select(metric)

        def build(seconds: float) -> str:
            return f"max by ({by}) ({over('max', series, seconds)})"

        return self._history.ask_whole(name, build, span)

    def _select(self, metric: str, *matchers: str) -> str:
        return f"{metric}{{{','.join(filter(None, (self._matcher, *matchers)))}}}"


def _holder(labels: Labels) -> HolderId:
    given = dict(labels)
    is_job = given.get("scheduler") == "slurm"
    place = ("", given.get("job_id", "")) if is_job else (given.get("namespace", ""), given.get("pod", ""))
    return HolderId(given.get("cluster", ""), given.get("scheduler", ""), *place)


def _board(labels: Labels) -> Board:
    given = dict(labels)
    return given.get("cluster", ""), given.get("uuid", ""), given.get("mig_uuid", "")


def _key(labels: Labels) -> Key:
    return _holder(labels), _board(labels)


def bridge(track: UnitTrack) -> None:
    """Closes gaps inside idle runs: the agent measured these runs while Prometheus did not scrape."""
    track.seen = merge([*track.seen, *track.idle[0]])
