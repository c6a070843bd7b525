"""The lives of the holders of a simulated cluster (history.py) as they were, for a replay that sees everything."""

from __future__ import annotations

import itertools
from collections import defaultdict

from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.backtest.gather import find_joint, kind_of
from gpu_exporter.reports.backtest.lives import LEFT, LOST, OPEN, WORK, HolderLife, IdleRun, PastGang, Tenure
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.kube import KubeOwner
from tests.testbed.history import Cluster, Hold, Holder


def true_gangs(cluster: Cluster) -> list[PastGang]:
    """The gangs, with the idle time of each holder at each floor. Gaps of scrapes are no gaps here."""
    holds: dict[tuple[Holder, float], list[Hold]] = defaultdict(list)
    for hold in itertools.chain.from_iterable(cluster.holds.values()):
        if hold.start < cluster.end and hold.end > cluster.start:
            holds[hold.holder, hold.start if not hold.holder.namespace else 0.0].append(hold)
    gangs: dict[tuple[str, ...], PastGang] = {}
    starts: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for (holder, _), of in sorted(holds.items(), key=lambda item: min(each.start for each in item[1])):
        scheduler = "kubernetes" if holder.namespace else "slurm"
        life = HolderLife(
            cluster.name, HolderName(scheduler, holder.namespace, holder.name), [_tenure(cluster, h) for h in of]
        )
        life.held, life.owner = len(of), holder.user and f"{holder.user}/{holder.account}"
        kind, owner = holder.owner
        names = [holder.owner] if kind else []
        if kind == "Deployment":
            names = [("ReplicaSet", owner), holder.owner]
        elif holder.above[0]:
            names.append(holder.above)
        controllers = [KubeOwner(cluster.name, holder.namespace, *each) for each in names]
        joint = find_joint(controllers)
        kinds = tuple(each.kind for each in controllers)
        if joint is not None:
            kind, owner = joint.kind, joint.name
        family = (holder.namespace, kind, owner or holder.name)
        key = (*family, holder.name, str(holder.number)) if joint is None else family
        title = "" if joint is None else f"{kind}/{owner}"
        gang = gangs.setdefault(key, PastGang([], title, kinds, kind_of(kinds), holder.team))
        gang.lives.append(life)
        starts[family].append(life.start)
        gang.starts = starts[family]
    return list(gangs.values())


def _tenure(cluster: Cluster, hold: Hold) -> Tenure:
    end = min(hold.end, cluster.end)
    unit = hold.unit
    gaps = cluster.nodes[unit.node].gaps
    is_lost = any(gap.start == hold.end and gap.end >= cluster.end for gap in gaps)
    ended = OPEN if hold.end >= cluster.end else LOST if is_lost else LEFT
    runs = []
    for floor in FLOORS:
        idle: list[IdleRun] = []
        at = hold.start
        for number, phase in enumerate(hold.phases, 1):
            stop = end if number == len(hold.phases) else min(at + phase.seconds, end)
            if phase.mean == 0.0 and phase.noise <= floor and at < end:
                begin = at
                if idle and idle[-1].end == at:
                    begin = idle.pop().start
                idle.append(IdleRun(begin, stop, ended if stop == end else WORK))
            at += phase.seconds
        runs.append(tuple(idle))
    return Tenure(
        unit.node, unit.uuid, unit.instance, unit.model, hold.start, end, ended, tuple(runs), share=unit.share
    )
