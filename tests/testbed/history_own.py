"""The series of a simulated cluster (history.py) as gpu-exporter publishes them: idle runs and counters of allocations.

The agent does not run while the scrapes of its node fail (Gap.failed): its idle runs end, and held time grows. While the
server itself is down, the agent goes on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.testbed.history import Cluster, Hold, Node, Unit
from tests.testbed.history_series import Labels, Run, Sheet, constant

FLOOR = 0.001  # engine activity that is noise to the agent (ledger.gpm_idle_max_ratio)


def own(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Series of gpu-exporter, and `up` of its targets."""
    sizes: dict[tuple[str, str, int, float], int] = defaultdict(int)
    for hold in (hold for holds in cluster.holds.values() for hold in holds):
        sizes[_run_of(hold)] += 1
    for node in cluster.nodes.values():
        for target in node.targets:
            sheet = Sheet(cluster, target, node.gaps)
            place = {"job": "gpu-exporter", "instance": target.instance.replace("9400", "9836"), "node": node.name}

            def put_all(labels: Labels, sheet: Sheet = sheet) -> None:
                sheet.put(labels, cluster.start, cluster.end, constant(1))

            put_all({"__name__": "up", **place})
            put_all({"__name__": "gpu_exporter_build_info", **place})
            put_all({"__name__": "gpu_exporter_sample_interval_seconds", **place})
            last = {"__name__": "gpu_exporter_last_sample_timestamp_seconds", **place}

            def clock(first: int, count: int, sheet: Sheet = sheet) -> list[Run]:
                return [[sheet.time(first), count, sheet.step]]

            sheet.put(last, cluster.start, cluster.end, clock)
            for unit in node.units:
                board = {**place, "uuid": unit.uuid, "gpu": str(unit.gpu)}
                if unit.instance in ("", "1"):
                    put_all({"__name__": "gpu_up", **board})
                    put_all({"__name__": "gpu_info", **board, "name": unit.model})
                for hold in cluster.holds.get(unit, ()):
                    _put_hold(sheet, board, node, unit, hold, cluster, sizes[_run_of(hold)])
            yield from sheet.lines()


def _run_of(hold: Hold) -> tuple[str, str, int, float]:
    return hold.holder.namespace, hold.holder.name, hold.holder.number, hold.start


def _put_hold(sheet: Sheet, board: Labels, node: Node, unit: Unit, hold: Hold, cluster: Cluster, size: int) -> None:
    holder = hold.holder
    start, end = max(hold.start, cluster.start), min(hold.end, cluster.end)
    if start >= end:
        return
    labels = {**board, "mig_uuid": f"MIG-{unit.uuid}-{unit.instance}" if unit.instance else ""}
    if holder.namespace:
        labels |= {"scheduler": "kubernetes", "namespace": holder.namespace, "pod": holder.name, "container": "main"}
    else:
        labels |= {"scheduler": "slurm", "job_id": holder.name}
    labels = {name: value for name, value in labels.items() if value}
    info = {"pod_uid": holder.uid} if holder.namespace else {"user": holder.user, "account": holder.account}

    def put(name: str, begin: float, stop: float, value: float, rise: float = 0.0, more: Labels | None = None) -> None:
        def values(first: int, count: int) -> list[Run]:
            at = sheet.time(first)
            return [[value + rise * (at - begin), count, *([rise * sheet.step] if rise else [])]]

        sheet.put({"__name__": f"gpu_allocation_{name}", **labels, **(more or {})}, begin, stop, values)

    put("info", start, end, 1, more=info)
    put("start_timestamp_seconds", start, end, hold.start)
    put("holder_units", start, end, size)
    longest = observed = 0.0
    at = hold.start
    for phase in hold.phases:
        put("utilization_ratio", max(at, start), min(at + phase.seconds, end), phase.mean)
        at += phase.seconds
    parts = list(_states(hold, [(gap.start, gap.end) for gap in node.gaps if gap.failed]))
    for (begin, stop, state, run_start, active), (*_, after, _, _) in itertools.pairwise([*parts, (0, 0, "", 0, 0)]):
        first = max(begin, start)
        if state != "away" and first < stop:
            put("idle_run_seconds", first, stop, first - run_start if state == "idle" else 0, float(state == "idle"))
            put("idle_run_witnesses", first, stop, 2 if state == "idle" else 0)
            put("idle_gap_longest_seconds", first, stop, longest)
            put(
                "last_active_timestamp_seconds",
                first,
                stop,
                first if state == "work" else active,
                float(state == "work"),
            )
            put("held_seconds_total", first, stop, first - hold.start, 1.0)
            put("observed_seconds_total", first, stop, observed + first - begin, 1.0)
        observed += (stop - begin) * (state != "away")
        if state == "idle" and after == "work":
            longest = max(longest, stop - run_start)


def _states(hold: Hold, away: list[tuple[float, float]]) -> Iterator[tuple[float, float, str, float, float]]:
    """Start, end, and state of each part: idle, work, or away; the start of its idle run, and the last activity."""
    at, parts = hold.start, []
    for phase in hold.phases:
        parts.append((at, at + phase.seconds, "idle" if phase.mean == 0.0 and phase.noise <= FLOOR else "work"))
        at += phase.seconds
    bounds = sorted(
        {edge for part in parts for edge in part[:2]} | {e for gap in away for e in gap if hold.start < e < hold.end}
    )
    run_start, active, before = hold.start, hold.start, ""
    for begin, stop in itertools.pairwise(bounds):
        state = next(of for first, last, of in parts if first <= begin < last)
        if any(first <= begin < last for first, last in away):
            state = "away"
        if state == "idle" and before != "idle":
            run_start = begin
        yield begin, stop, state, run_start, active
        if state == "work":
            active = stop
        before = state
