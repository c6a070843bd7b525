"""Reads the gangs of a period from a PromQL API: holders from the exporters, their owners from kube-state-metrics."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.decision.surroundings import BATCH, INTERACTIVE, LOOSE, SERVING, UNCLEAR
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.backtest.curves import CurveSource
from gpu_exporter.reports.backtest.gauges import GaugeTracks
from gpu_exporter.reports.backtest.lives import HolderLife, PastGang, Tenure
from gpu_exporter.reports.backtest.own import OwnTracks, bridge
from gpu_exporter.reports.backtest.tracks import build_tenures, doubt_contradicted
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.cells import HolderId
from gpu_exporter.reports.usage.gather import CHUNK_S, ReportWatch, parts
from gpu_exporter.reports.usage.site import EXPORTERS, SiteExporters, cluster_part
from gpu_exporter.reports.usage.sources.gauges import COVERED_S
from gpu_exporter.reports.usage.sources.kube import KubeOwner, KubeReader, PodFacts, PodName

# Labels of pods that are used interactively, as the reconciler knows them, if kube-state-metrics publishes them.
INTERACTIVE_LABELS = (("label_notebook_name", ".+"), ("label_component", "singleuser-server"))
SERIES_MAX = 6_000  # of a day that is read in one part
FACTS_S = 3 * CHUNK_S  # of the data of kube-state-metrics in one part: its many series have few values

NO_FACTS = PodFacts()


@dataclass(slots=True)
class PodPast:
    """The data of kube-state-metrics about all pods that had one name.

    - `starts`, `ends`: when each of these pods began and completed (Unix seconds).
    - `asked`: the largest number of units that one of them requested, None if unknown.
    - `is_interactive`: its labels are those of a notebook.
    """

    facts: PodFacts = NO_FACTS
    starts: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()
    asked: float | None = None
    is_interactive: bool = False


NO_PAST = PodPast()


class KubeFacts:
    """Collects the data of kube-state-metrics about pods and their controllers in the period."""

    def __init__(self) -> None:
        self.pods: dict[PodName, PodPast] = {}
        self.above: dict[KubeOwner, KubeOwner] = {}

    def read(self, kube: KubeReader, day: WindowSpan) -> None:
        """Adds the data of one day. Raises AnswerError."""
        for pod, facts in kube.read_pods(day).items():
            self._past(pod).facts = facts
        for pod, walls in kube.read_starts(day).items():
            self._past(pod).starts = tuple(sorted({*self._past(pod).starts, *walls}))
        for pod, walls in kube.read_ends(day).items():
            self._past(pod).ends = tuple(sorted({*self._past(pod).ends, *walls}))
        for pod, units in kube.read_asked(day).items():
            self._past(pod).asked = max(units, self._past(pod).asked or 0.0)
        for label, pattern in INTERACTIVE_LABELS:
            for pod in kube.read_labelled(label, pattern, day):
                self._past(pod).is_interactive = True
        self.above |= kube.read_above(day)

    def _past(self, pod: PodName) -> PodPast:
        found = self.pods.get(pod)
        if found is None:
            found = self.pods[pod] = PodPast()
        return found

    def of(self, pod: PodName) -> PodPast:
        """Returns the data about this pod; empty if there is none."""
        return self.pods.get(pod, NO_PAST)

    def controllers_of(self, pod: PodName) -> list[KubeOwner]:
        """Returns the known controllers of a pod, nearest first."""
        facts = self.of(pod).facts
        if not facts.owner:
            return []
        own = KubeOwner(pod.cluster, pod.namespace, facts.kind, facts.owner)
        return [own, *(self.above[own] for _ in range(own in self.above))]


class GangHistory(NamedTuple):
    """The gangs, the sources that showed them, and texts about missing values."""

    gangs: list[PastGang]
    missing: list[str]
    sources: Sequence[CurveSource]


def read_gangs(
    history: History,
    matcher: str,
    team_label: str,
    policy: Policy,
    site: SiteExporters,
    span: WindowSpan,
    watch: ReportWatch,
) -> GangHistory:
    """Reads the gangs of a period. If gpu-exporter's series cover it, no other exporter is read. Raises AnswerError."""
    series = max(site.series, site.own)
    days = list(parts(span, series, site.new, SERIES_MAX))
    watch.begin(days, series, site.new)
    kube = KubeReader(history, cluster_part(matcher), team_label)
    facts = KubeFacts()
    if site.has_kube:
        kube.look(span)
    own = OwnTracks(history, matcher, policy) if site.prefers_own else None
    others = {} if own else {name: GaugeTracks(history, EXPORTERS[name](), matcher) for name in site.exporters}

    def read_samples() -> None:
        for day in days:
            for source in (own,) if own is not None else others.values():
                source.read(day)
            history.end_chunk()
            watch.end_chunk()

    def read_facts() -> None:
        at = span.start
        while site.has_kube and at < span.end:
            facts.read(kube, span._replace(start=at, end=min(span.end, at + FACTS_S)))
            at += FACTS_S

    # The server works for one of them while the other parses.
    for _ in history.ask_ahead(lambda read: read(), (read_samples, read_facts)):
        pass
    missing: list[str] = []
    if own is not None:
        for track in own.tracks.values():
            bridge(track)
        cuts = {holder: sorted(starts) for holder, starts in own.starts.items()}
        gangs = list(build_gangs(build_tenures(own.tracks, span.end, cuts), facts))
        for life in (life for gang in gangs for life in gang.lives):
            own.describe(life)
        return GangHistory(gangs, missing, [own])
    doubt_contradicted([source.tracks for source in others.values()])
    tenures: dict[HolderId, list[Tenure]] = {}
    for name, source in others.items():
        held = sorted({holder for holder, _ in source.tracks if holder is not None})
        starts = {holder: facts.of(_pod(holder)).starts for holder in held}
        ends = {holder: facts.of(_pod(holder)).ends for holder in held}
        is_sparse = any(track.interval_s > COVERED_S for track in source.tracks.values())
        for holder, found in build_tenures(source.tracks, span.end, starts, ends, has_free=True).items():
            tenures.setdefault(holder, found)  # of two exporters, the first that shows a holder counts
        if is_sparse:
            missing.append(
                f"proof of idle time while samples of {name} are more than {COVERED_S:.0f} s apart: scrape it "
                "every 30 s"
            )
        if not held:
            missing.append(f"the holders of GPUs in the series of {name}, which names no holder")
    if not tenures:
        raise AnswerError(f"{history.address}: no exporter names a holder of a GPU in this period")
    return GangHistory(list(build_gangs(tenures, facts)), missing, list(others.values()))


def build_gangs(tenures: Mapping[HolderId, list[Tenure]], facts: KubeFacts) -> Iterator[PastGang]:
    """Groups the holders into gangs. Yields the gangs in the order of their names."""
    gangs: defaultdict[tuple[str, ...], PastGang] = defaultdict(lambda: PastGang([]))
    starts: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    families: list[tuple[PastGang, tuple[str, ...]]] = []
    for holder, found in sorted(tenures.items()):
        controllers = facts.controllers_of(_pod(holder))
        joint = find_joint(controllers)
        place: tuple[str, ...] = (holder.cluster, holder.scheduler, holder.namespace)
        group = joint or next(iter(controllers), None)
        family = (*place, "", holder.name) if group is None else (*place, group.kind, group.name)
        past = facts.of(_pod(holder)) if holder.scheduler == "kubernetes" else NO_PAST
        for number, life in enumerate(_lives(holder, found)):
            life.held = None if past.asked is None else round(past.asked)
            starts[family].append(life.start)
            gang = gangs[(*place, holder.name, str(number)) if joint is None else family]
            gang.lives.append(life)
            gang.title = "" if joint is None else f"{joint.kind}/{joint.name}"
            gang.owner_kinds = tuple(each.kind for each in controllers)
            gang.kind = INTERACTIVE if past.is_interactive else kind_of(gang.owner_kinds)
            gang.team = past.facts.team
            families.append((gang, family))
    for gang, family in families:
        gang.starts = starts[family]
    yield from gangs.values()


def find_joint(controllers: Sequence[KubeOwner]) -> KubeOwner | None:
    """Returns the highest controller whose pods form a gang, by the reconciler's rules. None if the pod has no gang."""
    joint = list(itertools.takewhile(lambda each: each.kind not in LOOSE, controllers))
    return joint[-1] if joint else None


def kind_of(owner_kinds: Sequence[str]) -> str:
    """Returns the class of a pod, from the kinds of its controllers (nearest first). The history lacks the other signs:
    routes, API groups, and controllers above a StatefulSet.
    """
    if any(kind in ("PodClique", "RoleSet") for kind in owner_kinds):  # Grove's and AIBrix's, which control pods
        return SERVING
    return BATCH if any(kind.endswith("Job") for kind in owner_kinds) else UNCLEAR


def _lives(holder: HolderId, tenures: Iterable[Tenure]) -> Iterator[HolderLife]:
    """Yields one life for each holder that had this name. A life ends where the holder had no unit."""
    name = HolderName(holder.scheduler, holder.namespace, holder.name)
    owner = "/".join(filter(None, (holder.user, holder.account)))
    known = _facts_of(holder.user, holder.account)
    life: HolderLife | None = None
    for tenure in sorted(tenures, key=lambda each: (each.start, each.end, each.uuid, each.mig)):
        if life is not None and tenure.start < life.end:
            life.tenures.append(tenure)
            continue
        if life is not None:
            yield life
        life = HolderLife(holder.cluster, name, [tenure], owner, facts=known)
    if life is not None:
        yield life


@cache
def _facts_of(user: str, account: str) -> dict[str, frozenset[str]]:
    """Returns HolderLife.facts. All holders of an account share them: a month has hundreds of thousands of holders."""
    return {"user": frozenset([user]), "account": frozenset([account])}


def _pod(holder: HolderId) -> PodName:
    return PodName(holder.cluster, holder.namespace, holder.name)
