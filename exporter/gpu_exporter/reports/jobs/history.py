"""Reads the runs of a job from the series of gpu-exporter in a PromQL API, also after the job's end.

Coarse windows show when the job had series. Finer windows of this time then have its counters. A requeued job keeps its
labels, but all its counters begin at 0 in the new run, and its start differs. If one run ends and the next begins in
the same window, the end is unknown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.vector import cluster_matchers, quote
from gpu_exporter.reports.history.asking import Answers, History, Labels, WindowSpan
from gpu_exporter.reports.jobs.model import ABOUT, APART_S, OWNER, SUMS, GpuUse, JobRun, Slot, build_run, group_runs
from gpu_exporter.reports.jobs.names import RAWS_MAX, AskedJob, any_of

KEY = ("cluster", "node", "uuid", "mig_uuid", "namespace", "pod", "container", "job_id")
INFO = (*OWNER, *ABOUT, "slurm_cluster", "gpu", "mig")
FIRST_S = 60.0  # shortest first window; a week has 700 windows of 15 minutes
FIRST_WINDOWS = 700
WINDOW_S = 30.0  # shortest window of the course
POINTS = 60_000  # values of one answer, over all GPUs
WINDOWS = 1500, 24  # at most, and at least: a job of two days has windows of two minutes
SERIES_MAX = 4_000  # GPUs of all runs together
RESET = 0.5  # a smaller fall is not a new beginning: of two targets with one holder, the newer one has left
START_S = 2.0  # starts that differ by less are the same
Key: TypeAlias = tuple[str, ...]
By: TypeAlias = dict[Key, dict[float, float]]


class FoundSeries(NamedTuple):
    """The series of a job. `about`: labels by series. `span`: the time in which the series existed."""

    about: dict[Key, dict[str, str]]
    span: WindowSpan


class JobHistory:
    """Queries one PromQL API about one job. Every method may raise AnswerError."""

    def __init__(self, history: History, matcher: str, since_s: float, now: float) -> None:
        self._history, self._matcher = history, matcher
        self._since_s, self._now = since_s, math.floor(now)

    def read(self, asked: AskedJob) -> list[JobRun]:
        found = self._find(asked)
        if found is None:
            return []
        self._refuse_several(asked, found)
        ids = {key[7] or key[5] for key in found.about}
        label = "job_id" if asked.number else "pod"
        where = ",".join(filter(None, (self._of(asked), any_of(label, ids), self._matcher)))
        uses = self._read_uses(found, where)
        running = {_key(labels) for labels, _ in self._history.ask_now("now", self._count(where), self._now)}
        self._add_boards(found, uses)
        return self._make_runs(found, uses, running)

    def _of(self, asked: AskedJob) -> str:
        return f'namespace="{quote(asked.namespace)}"' if asked.namespace else 'scheduler="slurm"'

    def _find(self, asked: AskedJob) -> FoundSeries | None:
        wanted = [f"{self._of(asked)},{each}" if asked.number else each for each in asked.matchers()]
        found = self._discover(wanted)
        if found is None and asked.namespace:
            pods = self._pods_of(asked)
            found = self._discover([f"{self._of(asked)},{any_of('pod', pods)}"]) if pods else None
        if found is not None and asked.number:  # a task's label of the array may come after some minutes
            ids = sorted({key[7] for key in found.about})
            if len(ids) > RAWS_MAX:
                raise AnswerError(f"it has {len(ids):,} tasks with series, more than {RAWS_MAX:,}: ask for one task")
            found = self._discover([f"{self._of(asked)},{any_of('job_id', ids)}"])
        return found

    def _discover(self, wanted: Sequence[str]) -> FoundSeries | None:
        window = max(FIRST_S, math.ceil(self._since_s / FIRST_WINDOWS))
        span = WindowSpan(self._now - math.ceil(self._since_s / window) * window, self._now, window)
        each = (f"count_over_time(gpu_allocation_info{{{self._with(where)}}}[{window:.0f}s])" for where in wanted)
        labels = ", ".join((*KEY, *INFO))
        about: dict[Key, dict[str, str]] = {}
        first, last = math.inf, -math.inf
        for series, windows in self._history.ask_table(
            "find", f"count by ({labels}) ({' or '.join(each)})", span
        ).items():
            texts = dict(series)
            known = about.setdefault(_key(series), {})
            known |= {name: text for name in INFO if (text := texts.get(name, ""))}
            first, last = min(first, *windows), max(last, *windows)
            if len(about) > SERIES_MAX:
                raise AnswerError(f"it has more than {SERIES_MAX:,} GPUs in this time: take a shorter --since")
        if not about:
            return None
        return FoundSeries(about, WindowSpan(first, last + window, window))

    def _with(self, where: str) -> str:
        return ",".join(filter(None, (where, self._matcher)))

    def _pods_of(self, asked: AskedJob) -> list[str]:
        """Returns the pods of the owner with this name, from the recordings of the site's rules."""
        where = [
            f'namespace="{quote(asked.namespace)}"',
            f'workload="{quote(asked.name)}"',
            *cluster_matchers(self._matcher),
        ]
        query = f"count by (pod) (last_over_time(allocation:owner:info{{{','.join(where)}}}[{self._since_s:.0f}s]))"
        pods = [dict(labels).get("pod", "") for labels, _ in self._history.ask_now("pods", query, self._now)]
        return sorted(filter(None, pods))[:RAWS_MAX]

    @staticmethod
    def _refuse_several(asked: AskedJob, found: FoundSeries) -> None:
        """Raises AnswerError if several clusters have a job or pod with this name, as these are different ones."""
        places = {(key[0], about.get("slurm_cluster", "")) for key, about in found.about.items()}
        slurm = {name for _, name in places} - {""}
        clusters = {cluster for cluster, _ in places}
        if len(clusters) > 1:
            several = ", ".join(f'cluster="{name}"' for name in sorted(clusters))
            raise AnswerError(f"several clusters have {asked.text}: choose one with --source.matcher: {several}")
        if len(slurm) > 1:
            raise AnswerError(
                f"the Slurm clusters {', '.join(sorted(slurm))} have {asked.text}, and their exporters have the same "
                "label cluster: choose the nodes of one with --source.matcher"
            )

    def _count(self, where: str) -> str:
        return f"count by ({', '.join(KEY)}) (gpu_allocation_info{{{where}}})"

    def _read_uses(self, found: FoundSeries, where: str) -> list[tuple[Key, GpuUse]]:
        start, end = found.span.start, found.span.end
        most, least = WINDOWS
        points = max(least, min(most, POINTS // len(found.about)))
        window = max(WINDOW_S, float(math.ceil((end - start) / points)))
        span = WindowSpan(start, start + math.ceil((end - start) / window) * window, window)
        by, over = ", ".join(KEY), f"[{window:.0f}s]"
        queries = {name: _counter(name, where, over) for name in (*SUMS, "energy")}
        queries["start"] = f"max by ({by}) (last_over_time(gpu_allocation_start_timestamp_seconds{{{where}}}{over}))"
        queries["memory"] = f"max by ({by}) (max_over_time(gpu_allocation_memory_used_bytes{{{where}}}{over}))"
        queries["samples"] = f"sum by ({by}) (count_over_time(gpu_allocation_info{{{where}}}{over}))"
        queries["states"] = f"sum by ({by}, state) (count_over_time(gpu_allocation_state{{{where}}}{over}))"
        queries["causes"] = f"sum by ({by}, cause) (count_over_time(gpu_allocation_cause{{{where}}}{over}))"
        value = f"last_over_time(gpu_allocation_cause_value{{{where}}}{over})"
        queries["values"] = f"max by ({by}, cause, quantity) ({value})"
        tables = self._history.ask_tables(queries, span)
        plain = {name: _by_key(tables[name]) for name in (*SUMS, "energy", "start", "memory", "samples")}
        uses: list[tuple[Key, GpuUse]] = []
        for key, starts in plain["start"].items():
            uses += [(key, run) for run in self._split(key, starts, plain, window)]
        _add_counts(uses, tables)
        return uses

    @staticmethod
    def _split(key: Key, starts: Mapping[float, float], plain: Mapping[str, By], window: float) -> list[GpuUse]:
        """Divides one series into runs, by the start that it reports."""
        runs: list[GpuUse] = []
        before: dict[str, float] = {}
        counters = {name: plain[name].get(key, {}) for name in (*SUMS, "energy")}
        last = 0.0  # end of the last window with a sample
        for at in sorted(starts):
            began = starts[at]
            # A later run of the job begins after the time that the run before held the GPU. Another start within this
            # time is a correction: the host's clock was set, or an exporter without its state read another source.
            if not runs or began - runs[-1].start > max(START_S, before.get("held", 0.0) - APART_S):
                runs.append(GpuUse(key[1], "", key[2], key[3], start=began))
                before, last = {}, max(began, at - window) if runs[1:] else began
            run, grown = runs[-1], dict[str, float]()
            run.start = began
            for name, values in counters.items():
                if (value := values.get(at)) is not None:
                    old = before.get(name, 0.0)
                    is_new = value < RESET * old  # an exporter without its state begins at 0
                    grown[name] = value if is_new else max(0.0, value - old)
                    before[name] = value if is_new else max(value, old)
            for name in SUMS:
                setattr(run, f"{name}_s", getattr(run, f"{name}_s") + grown.get(name, 0.0))
            if "energy" in grown:
                run.energy_j = (run.energy_j or 0.0) + grown["energy"]
            memory = plain["memory"].get(key, {}).get(at)
            run.memory_max = run.memory_max if memory is None else max(memory, run.memory_max or 0.0)
            run.samples += plain["samples"].get(key, {}).get(at, 0.0)
            until = at + window
            length = max(window, min(until - last, until - began))
            run.slots.append(Slot(until - length, length, grown.get("observed", 0.0), grown.get("busy", 0.0)))
            last, run.end = until, until
        for run in runs:
            if not counters["busy"]:  # a server may drop a series; time without utilization is not known
                run.observed_s = 0.0
            run.settle(seen=run.end - window)  # the last sample is in the last window
        return runs

    def _add_boards(self, found: FoundSeries, uses: Sequence[tuple[Key, GpuUse]]) -> None:
        """Adds the model and the memory of each GPU."""
        boards, instances = ({key[place] for key in found.about} - {""} for place in (2, 3))
        length = found.span.end - found.span.start
        span = WindowSpan(found.span.start, found.span.end, max(FIRST_S, math.ceil(length / 100)))
        queries = [("gpu_info", "uuid", boards, ", name"), ("gpu_memory_total_bytes", "uuid", boards, "")]
        queries += [("gpu_mig_memory_total_bytes", "mig_uuid", instances, "")]
        for name, label, values, more in queries:
            if not values:
                continue
            series = f"{name}{{{self._with(any_of(label, values))}}}"
            by = f"cluster, node, {label}{more}"
            whole = self._history.ask_whole("boards", partial(_last, by, series), span)
            for labels, value in whole.items():
                texts = dict(labels)
                for key, use in uses:
                    unit = use.uuid if label == "uuid" else use.mig_uuid
                    if (texts.get("cluster", ""), texts.get("node", ""), texts.get(label)) != (key[0], key[1], unit):
                        continue
                    if name == "gpu_info":
                        use.model = texts.get("name", "")
                    elif not use.mig_uuid or label == "mig_uuid":
                        use.memory_total = value

    def _make_runs(
        self, found: FoundSeries, uses: Sequence[tuple[Key, GpuUse]], running: Collection[Key]
    ) -> list[JobRun]:
        last: dict[Key, GpuUse] = {}
        keys: dict[int, Key] = {}
        for key, use in uses:
            use.gpu = _place(found.about[key])
            last[key], keys[id(use)] = use, key
        runs = []
        for raw, gpus in group_runs((key[7] or f"{key[4]}/{key[5]}", use) for key, use in uses):
            is_running = any(keys[id(gpu)] in running and last[keys[id(gpu)]] is gpu for gpu in gpus)
            runs.append(build_run(raw, found.about[keys[id(gpus[0])]], gpus, is_running=is_running))
        return runs


def _place(about: Mapping[str, str]) -> str:
    """Returns the GPU's index as nvidia-smi prints it, followed by `:` and the MIG instance if there is one."""
    return ":".join(filter(None, (about.get("gpu", ""), about.get("mig", ""))))


def _last(by: str, series: str, seconds: float) -> str:
    return f"max by ({by}) (last_over_time({series}[{seconds:.0f}s]))"


def _counter(name: str, where: str, over: str) -> str:
    by = ", ".join(KEY)
    if name == "energy":
        each = f"max by ({by}, method) (last_over_time(gpu_allocation_energy_joules_total{{{where}}}{over}))"
        return f"sum by ({by}) ({each})"
    return f"max by ({by}) (last_over_time(gpu_allocation_{name}_seconds_total{{{where}}}{over}))"


def _add_counts(uses: Sequence[tuple[Key, GpuUse]], tables: Mapping[str, Answers]) -> None:
    """Adds the number of samples with each state and cause to the run in which the samples were taken."""
    runs: dict[Key, list[GpuUse]] = defaultdict(list)
    for key, use in uses:
        runs[key].append(use)
    for name, label in (("states", "state"), ("causes", "cause"), ("values", "cause")):
        for labels, windows in tables[name].items():
            texts, of_key = dict(labels), runs.get(_key(labels), [])
            for at, value in sorted(windows.items()):
                run = next((each for each in reversed(of_key) if each.slots and at >= each.slots[0].start - 1.0), None)
                if run is None:
                    continue
                if name == "values":
                    run.values.setdefault(texts.get(label, ""), {})[texts.get("quantity", "")] = value
                else:
                    counts: dict[str, float] = getattr(run, name)
                    counts[texts.get(label, "")] = counts.get(texts.get(label, ""), 0.0) + value


def _key(labels: Labels) -> Key:
    texts = dict(labels)
    return tuple(texts.get(name, "") for name in KEY)


def _by_key(table: Answers) -> By:
    return {_key(labels): dict(values) for labels, values in table.items()}
