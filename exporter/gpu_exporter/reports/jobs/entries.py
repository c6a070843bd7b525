"""Reads the runs of a job without a PromQL API: running ones from exporters, ended ones from the records on this node.

Exporters and records use the same format: `allocations` of the status page (/api/v1/status).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_exporter.common.address import Address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB
from gpu_exporter.common.files import read_kept
from gpu_exporter.common.outside import load_json, need_real, real
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reports.jobs.model import ABOUT, NODE_APART_S, OWNER, SUMS, GpuUse, JobRun, build_run, group_runs
from gpu_exporter.reports.jobs.names import AskedJob
from gpu_exporter.reports.top.nodes import ODD, WORKERS, read_status
from gpu_exporter.reports.top.nodes import name_of as node_of

FILE_MAX = 8 * MIB  # of the records of one user
TEXT_MAX = 256
ROUNDED_S = 0.01  # times in a record are rounded
LISTED_S = 15.0  # how long series may show a run after its end: until the next poll, which is late on a busy node
BOARD = ("name", "memory_total_bytes")  # of a GPU, beside its allocations


def read_exporters(
    asked: AskedJob, nodes: Sequence[Address], fetch: Callable[..., str]
) -> tuple[list[JobRun], list[str]]:
    """Reads the running runs of the job on these nodes. Also returns a text for each node that did not answer."""

    def read(node: Address) -> tuple[list[tuple[str, Any, float]], str]:
        found, problem = read_status(node, fetch, lambda answer: _list_entries(node_of(node), answer), "source")
        return found or [], problem and f"{node}: {problem}"

    try:
        answers = list(run_ahead(read, nodes, min(WORKERS, len(nodes)), "job"))
    except NoThread as exc:
        raise AnswerError(str(exc)) from exc
    entries = itertools.chain.from_iterable(found for found, _ in answers)
    return make_runs(asked, entries, is_running=True), [problem for _, problem in answers if problem]


def _list_entries(node: str, text: str) -> list[tuple[str, Any, float]]:
    """Returns the allocations of a status page, each with the name and memory of its GPU. Also returns the page's time,
    by the same clock as the starts of the allocations.
    """
    answer = load_json(text)
    boards = {gpu["uuid"]: {name: gpu[name] for name in BOARD} for gpu in answer["gpus"]}
    at = need_real(answer["timestamp_seconds"])
    return [(node, {**boards.get(each["uuid"], {}), **each}, at) for each in answer["allocations"]]


def read_records(asked: AskedJob, directory: Path) -> tuple[list[JobRun], list[str]]:
    """Reads the ended runs of the job from the records that this user may read. Also returns problems as texts."""
    entries: list[tuple[str, Any, float]] = []
    problems = []
    for path in _readable(directory):
        try:
            text = read_kept(path, FILE_MAX).decode("utf-8", "replace")
        except OSError as exc:
            problems.append(f"{path}: {exc}")
            continue
        for line in text.splitlines():
            try:  # one damaged line costs only itself
                record = load_json(line)
                end = need_real(record["end_timestamp_seconds"])
                entries += [(os.uname().nodename, each, end) for each in record["allocations"]]
            except ODD:
                continue
    return make_runs(asked, entries, is_running=False), problems


def _readable(directory: Path) -> list[Path]:
    """Returns the record files that this user may read. Only root can list the directory: also tries the user's own."""
    try:
        paths = sorted(directory.glob("[0-9]*.jsonl"))
    except OSError:
        paths = []
    own = directory / f"{os.geteuid()}.jsonl"
    return [path for path in dict.fromkeys((*paths, own)) if os.access(path, os.R_OK)]


def make_runs(asked: AskedJob, entries: Iterable[tuple[str, Any, float]], *, is_running: bool) -> list[JobRun]:
    """Makes runs from those of these allocations that belong to the job. `entries`: node, allocation, and the time up
    to which the allocation is known (Unix seconds).
    """
    abouts: dict[str, Mapping[str, Any]] = {}
    uses: dict[tuple[object, ...], tuple[str, GpuUse]] = {}  # the last entry of each GPU of a run
    for node, entry, end in entries:
        try:
            if asked.has(entry):
                raw = str(entry.get("job_id") or f"{entry.get('namespace')}/{entry.get('pod')}")
                use = _read_use(node, entry, end)
                uses[raw, use.start, use.uuid, use.mig_uuid] = raw, use
                abouts[raw] = entry
        except ODD:
            continue
    texts = {
        raw: {name: one_line(str(entry.get(name) or ""), TEXT_MAX) for name in (*ABOUT, *OWNER)}
        for raw, entry in abouts.items()
    }
    return [build_run(raw, texts[raw], gpus, is_running=is_running) for raw, gpus in group_runs(uses.values())]


def _read_use(node: str, entry: Mapping[str, Any], end: float) -> GpuUse:
    place = ":".join(str(entry[name]) for name in ("gpu", "mig") if entry.get(name) not in (None, ""))
    uuid, mig_uuid, model = (one_line(str(entry.get(name, "")), TEXT_MAX) for name in ("uuid", "mig_uuid", "name"))
    use = GpuUse(one_line(node, TEXT_MAX), one_line(place, TEXT_MAX), uuid, mig_uuid, model)
    use.start = need_real(entry["start_timestamp_seconds"])
    for name in SUMS:
        setattr(use, f"{name}_s", max(0.0, real(entry.get(f"{name}_seconds")) or 0.0))
    if real(entry.get("busy_seconds")) is None:
        use.observed_s = 0.0
    use.settle(seen=end)
    use.end = end
    use.energy_j = real(entry.get("energy_joules"))
    use.memory_max = real(entry.get("memory_max_bytes", entry.get("memory_used_bytes")))
    use.memory_total = real(entry.get("memory_total_bytes"))
    if state := entry.get("state"):
        use.samples, use.states = 1.0, {str(state): 1.0}
    for cause in entry.get("causes") or ():
        name = str(cause["name"])
        use.samples, use.causes[name] = 1.0, 1.0
        numbers = {str(quantity): real(value) for quantity, value in cause["values"].items()}
        use.values[name] = {quantity: value for quantity, value in numbers.items() if value is not None}
    return use


def merge_exact(runs: list[JobRun], records: Iterable[JobRun]) -> list[JobRun]:
    """Replaces the counters of each run by those in the node's records, which are newer than the last scrape. Adds runs
    that only the records contain.
    """

    def starts_as(run: JobRun, record: JobRun) -> bool:  # on its node: the nodes of a run may know different starts
        uuids = {gpu.uuid for gpu in record.gpus}
        starts = [run.start, *(gpu.start for gpu in run.gpus if gpu.uuid in uuids)]
        return any(abs(start - record.start) < NODE_APART_S for start in starts)

    for record in records:
        same = [run for run in runs if run.raw == record.raw and starts_as(run, record)]
        if not same:
            runs.append(record)
            continue
        uses = {(use.uuid, use.mig_uuid): use for run in reversed(same) for use in run.gpus}
        for exact in record.gpus:
            use = uses.get((exact.uuid, exact.mig_uuid))
            if use is None:
                same[0].gpus.append(exact)
            elif exact.held_s >= use.held_s - LISTED_S and exact.observed_s >= use.observed_s - ROUNDED_S:
                for name in (*(f"{each}_s" for each in SUMS), "energy_j", "end"):
                    setattr(use, name, getattr(exact, name))
                peaks = [each for each in (use.memory_max, exact.memory_max) if each is not None]
                use.memory_max = max(peaks, default=None)
        same[0].end = max(same[0].end, record.end)
    return runs
