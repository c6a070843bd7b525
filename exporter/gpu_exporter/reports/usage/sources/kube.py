"""kube-state-metrics: requests of running pods, owners, teams, and the GPUs that nodes offer."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.sources.intervals import Target, ask_targets, read_intervals, target_of
from gpu_exporter.reports.usage.sources.zeros import Table

REQUESTS, PHASE = "kube_pod_container_resource_requests", "kube_pod_status_phase"
INIT_REQUESTS, INIT = "kube_pod_init_container_resource_requests", "init"  # and the label of its series here
OWNER, POD_LABELS, POD_INFO = "kube_pod_owner", "kube_pod_labels", "kube_pod_info"
POD_START = "kube_pod_start_time"
# Owners of the controllers of pods, with the label that names the controller. There are none for other kinds.
ABOVE = {"ReplicaSet": ("kube_replicaset_owner", "replicaset"), "Job": ("kube_job_owner", "job_name")}
ALLOCATABLE = "kube_node_status_allocatable"
RESOURCES = 'resource=~"nvidia_com_gpu(_.+)?"'  # whole GPUs; a MIG instance has no size here
ANY_GPU = 'resource=~"nvidia_com_.+"'
HOLDING = 'phase=~"Pending|Running"'  # on a node: the scheduler has given the GPUs away before the images are there
OF_NODES = 'resource="cpu"'  # each node has it
RENAMED, COMPLETED = 'exported_pod!=""', 'phase=~"Succeeded|Failed"'
PLACE = "cluster, namespace"
POD = f"{PLACE}, pod"
GRID_S = 120.0
OVERLAP = 1.05  # of a window: targets that are present for more together are present at the same time
LOST = 0.8  # share of the scrapes that must succeed. The samples then stand for the whole time
OF_REQUEST = ("cluster", "namespace", "pod", "node", "resource", "container", INIT)
OFFER_S = 600.0
LOOK_S = 3 * 3600.0
ADDRESSES_MAX, NAMES_MAX = 300, 100  # in one query
HASH = re.compile(r"-[0-9a-z]{5,10}$")  # of the pod template, at the end of the name of a Deployment's ReplicaSet
NO_OWNER = "<none>"  # as kube-state-metrics writes it
MOMENT = re.compile(r"-[0-9]{8,10}$")  # at the end of the name of a CronJob's Job


class PodName(NamedTuple):
    cluster: str
    namespace: str
    name: str


class KubeOwner(NamedTuple):
    """A controller in a namespace of a cluster."""

    cluster: str
    namespace: str
    kind: str
    name: str


class PodFacts(NamedTuple):
    """The owner and the team of a pod. `kind`, `owner`: kind and name of the owner. `workload`: the owner's name for
    people. Texts are "" if unknown.
    """

    workload: str = ""
    kind: str = ""
    team: str = ""
    owner: str = ""


class KubeReader:
    """Reads kube-state-metrics. Every method may raise AnswerError."""

    def __init__(self, history: History, matcher: str, team_label: str) -> None:
        """`team_label`: a label of kube_pod_labels, such as label_team."""
        self._history, self._matcher, self._team = history, matcher, team_label
        self._is_renamed = False
        self.has_phases = True  # false if the phases of the pods of a cluster are missing

    def look(self, span: WindowSpan) -> None:
        """Finds out whether Prometheus renamed the labels of kube-state-metrics."""
        step = span._replace(window=min(LOOK_S, span.end - span.start))
        named = self._select(REQUESTS, RENAMED)
        self._is_renamed = any(True for _ in self._history.ask_windows("labels", f"count({named})", step))

    def read_requests(
        self, span: WindowSpan
    ) -> tuple[dict[tuple[PodName, str], dict[float, float]], set[tuple[str, float]] | None]:
        """Returns two results:

        - the GPU-seconds that pods on nodes requested, by pod and node, and by the start of the window
        - by cluster, the windows in which kube-state-metrics did not always show all pods. None if no pod requested
          a GPU at any time

        Completed pods keep their series of requests, so only the time in the phases Pending and Running counts.
        """
        requests, phases = self._select(REQUESTS, RESOURCES), self._select(PHASE, HOLDING)
        counts = self._history.ask_table("requests", self._with_init("count", span.window), span)
        if not counts:
            return {}, None
        queries = {
            "gpus": self._with_init("avg", span.window),
            "running": f"sum without (phase) ({over('avg', phases, span.window)}) > 0",
            **ask_targets(counts, span.window),
        }
        tables = self._history.ask_tables(queries, span)
        gpus, presence = tables["gpus"], tables["presence"]
        intervals = read_intervals(self._history, requests, counts, tables, span)
        answered = _find_answered(tables)
        running: dict[tuple[Target, tuple[str, ...]], Mapping[float, float]] = {}
        for labels, values in tables["running"].items():
            running[target_of(labels), _reported(labels, "namespace", "pod", "uid")] = values
            running.setdefault((target_of(labels), _reported(labels, "namespace", "pod")), values)
        present = {target_of(labels): values for labels, values in presence.items()}
        # Their label `node` is the target's own, so a pod without exported_node has no node.
        named_by_target = {target_of(labels) for labels in counts if dict(labels).get("exported_node")}
        by_target: defaultdict[tuple[str, ...], defaultdict[float, dict[Target, float]]]
        by_target = defaultdict(lambda: defaultdict(dict))
        for labels, samples in counts.items():
            target = target_of(labels)
            of_pod = running.get((target, _reported(labels, "namespace", "pod", "uid")))
            shares = of_pod or running.get((target, _reported(labels, "namespace", "pod")), {})
            request = _reported(labels, *OF_REQUEST)
            if target in named_by_target and not dict(labels).get("exported_node"):
                request = (*request[:3], "", *request[4:])
            of_request = by_target[request]
            for start in samples.keys() & shares.keys() & gpus.get(labels, {}).keys():
                answers = answered.get((target, start), 1.0)
                seconds = samples[start] * intervals[target][start] / (answers if answers >= LOST else 1.0)
                seconds = min(span.window, seconds) * min(1.0, shares[start])
                of_targets = of_request[start]
                of_targets[target] = of_targets.get(target, 0.0) + gpus[labels][start] * seconds
        found = _add_up_pods(by_target, present, span.window)
        blind = _find_blind(tables, _find_shards(by_target), span)
        without = self._find_without_phases({target_of(labels)[0] for labels in counts}, tables["running"], span)
        blind |= {(cluster, start) for cluster in without for start in _starts(span)}
        return found, blind

    def _with_init(self, function: str, window: float) -> str:
        """PromQL: a function of the requests, also of init containers, with a label that marks them."""
        own, of_init = (over(function, self._select(each, RESOURCES), window) for each in (REQUESTS, INIT_REQUESTS))
        return f'{own} or label_replace({of_init}, "{INIT}", "yes", "", "")'

    def _find_without_phases(self, clusters: Collection[str], running: Table, span: WindowSpan) -> set[str]:
        """Returns the clusters whose pods have requests, but no phases. A site may drop these many series."""
        without = set(clusters) - {target_of(labels)[0] for labels in running}
        if without:  # perhaps all pods have completed
            query = f"group by (cluster) ({over('last', self._select(PHASE), span.window)})"
            found = self._history.ask_table("phases", query, span)
            without -= {dict(labels).get("cluster", "") for labels in found}
        self.has_phases = self.has_phases and not without
        return without

    def read_completed(self, names: Collection[str], span: WindowSpan) -> dict[PodName, dict[float, float]]:
        """Returns the seconds for which these pods were in phase Succeeded or Failed, by the start of the window."""
        found: dict[PodName, dict[float, float]] = {}
        label = "exported_pod" if self._is_renamed else "pod"
        window = f"[{span.window * 1000 - 1:.0f}ms:{GRID_S:.0f}s]"
        for at in range(0, len(names), NAMES_MAX):
            some = "|".join(map(literal, sorted(names)[at : at + NAMES_MAX]))
            phases = self._own(self._select(PHASE, COMPLETED, f'{label}=~"{some}"'))
            query = f"count_over_time((max by ({POD}) ({phases}) == 1){window}) * {GRID_S:.0f}"
            for series in self._history.ask_windows("completed", query, span):
                found.setdefault(_name(series.labels), {}).update(series.values)
        return found

    def read_pods(self, span: WindowSpan) -> dict[PodName, PodFacts]:
        """Returns the owner and the team of each pod that requested a GPU at any time."""

        facts: dict[PodName, PodFacts] = {}
        for name, series, kept in (
            ("owners", self._select(OWNER), "owner_kind, owner_name"),
            ("teams", self._select(POD_LABELS, f'{self._team}!=""'), self._team),
        ):

            def build(seconds: float, series: str = series, kept: str = kept) -> str:
                last = self._own(over("last", series, seconds))
                return f"group by ({POD}, {kept}) ({last}) and on ({POD}) {self._with_gpus(seconds)}"

            for found in self._history.ask_whole(name, build, span):
                pod, labels = _name(found), dict(found)
                before = facts.get(pod, PodFacts())
                if name == "teams":
                    facts[pod] = before._replace(team=labels.get(self._team, ""))
                elif labels.get("owner_name", NO_OWNER) != NO_OWNER:
                    kind, owner = labels.get("owner_kind", ""), labels["owner_name"]
                    facts[pod] = before._replace(workload=workload_of(kind, owner), kind=kind, owner=owner)
        return facts

    def read_above(self, span: WindowSpan) -> dict[KubeOwner, KubeOwner]:
        """Returns the owners of controllers that have pods with GPUs, e.g. a Deployment of a ReplicaSet. See ABOVE."""
        found = {}
        for kind, (metric, label) in ABOVE.items():
            series = self._select(metric, f'owner_name!="{NO_OWNER}"')
            owned = self._select(OWNER, f'owner_kind="{kind}"')

            def build(seconds: float, series: str = series, owned: str = owned, label: str = label) -> str:
                pods = f"{self._own(over('last', owned, seconds))} and on ({POD}) {self._with_gpus(seconds)}"
                some = f'label_replace(group by ({PLACE}, owner_name) ({pods}), "{label}", "$1", "owner_name", "(.+)")'
                last = self._own(over("last", series, seconds))
                return f"group by ({PLACE}, {label}, owner_kind, owner_name) ({last}) and on ({PLACE}, {label}) {some}"

            for row in self._history.ask_whole("above", build, span):
                of = dict(row)
                place = of.get("cluster", ""), of.get("namespace", "")
                owner = KubeOwner(*place, of.get("owner_kind", ""), of.get("owner_name", ""))
                found[KubeOwner(*place, kind, of.get(label, ""))] = owner
        return found

    def read_labelled(self, label: str, pattern: str, span: WindowSpan) -> set[PodName]:
        """Returns the pods that requested a GPU at any time, and whose label of kube_pod_labels matches `pattern`."""
        series = self._select(POD_LABELS, f'{label}=~"{pattern}"')

        def build(seconds: float) -> str:
            last = self._own(over("last", series, seconds))
            return f"group by ({POD}) ({last}) and on ({POD}) {self._with_gpus(seconds)}"

        return {_name(row) for row in self._history.ask_whole("labelled", build, span)}

    def read_starts(self, span: WindowSpan) -> dict[PodName, list[float]]:
        """Returns the times at which pods that requested a GPU began (Unix seconds), by name. Names can be reused."""

        def build(seconds: float) -> str:
            began = self._own(over("last", self._select(POD_START), seconds))
            return f"max by ({POD}, uid) ({began}) and on ({POD}) {self._with_gpus(seconds)}"

        return _list_times(self._history.ask_whole("starts", build, span))

    def read_ends(self, span: WindowSpan) -> dict[PodName, list[float]]:
        """Returns the times at which pods that requested a GPU completed (Unix seconds, to GRID_S).

        Later samples may still name these pods, because the kubelet reports them for longer.
        """

        def build(seconds: float) -> str:
            completed = self._own(f"{self._select(PHASE, COMPLETED)} == 1")
            ended = f"min_over_time(timestamp({completed})[{seconds * 1000 - 1:.0f}ms:{GRID_S:.0f}s])"
            return f"min by ({POD}, uid) ({ended}) and on ({POD}) {self._with_gpus(seconds)}"

        return _list_times(self._history.ask_whole("ends", build, span, min))

    def read_asked(self, span: WindowSpan) -> dict[PodName, float]:
        """Returns the number of GPUs and instances that each pod requested."""

        def build(seconds: float) -> str:
            series = self._own(over("last", self._select(REQUESTS, ANY_GPU), seconds))
            return f"sum by ({POD}) (max by ({POD}, container, resource) ({series}))"

        return {_name(series): units for series, units in self._history.ask_whole("asked", build, span).items()}

    def read_offers(self, span: WindowSpan) -> dict[tuple[str, str], float]:
        """GPU-seconds that nodes offer in this time, by cluster and node."""
        offered = self._offered()

        def build(seconds: float) -> str:
            return f"sum_over_time(({offered})[{seconds * 1000 - 1:.0f}ms:{OFFER_S:.0f}s]) * {OFFER_S:.0f}"

        return _by_node(self._history.ask_whole("offers", build, span, operator.add))

    def read_most(self, span: WindowSpan) -> dict[tuple[str, str], float]:
        """The most GPUs that nodes offer at any time, by cluster and node."""
        offered = self._offered()

        def build(seconds: float) -> str:
            return f"max_over_time(({offered})[{seconds * 1000 - 1:.0f}ms:{OFFER_S:.0f}s])"

        return _by_node(self._history.ask_whole("most offers", build, span))

    def _offered(self) -> str:
        """PromQL: the GPUs that nodes offer."""
        of_resources = f"max by (cluster, node, resource) ({self._own(self._select(ALLOCATABLE, RESOURCES))})"
        return f"sum by (cluster, node) ({of_resources})"

    def read_bare(self, span: WindowSpan) -> set[tuple[str, str]]:
        """Nodes that offer no GPU and no instance, by cluster and node. Pods may hold their GPUs in another way, such
        as a resource claim.
        """

        def build(seconds: float) -> str:
            known, offers = (
                f"group by (cluster, node) ({self._own(over('last', self._select(ALLOCATABLE, resource), seconds))})"
                for resource in (OF_NODES, ANY_GPU)
            )
            return f"{known} unless {offers}"

        found = map(dict, self._history.ask_whole("bare nodes", build, span))
        return {(labels.get("cluster", ""), labels.get("node", "")) for labels in found}

    def read_nodes(self, addresses: Collection[str], span: WindowSpan) -> dict[tuple[str, str], str]:
        """Returns the nodes of pods with these IP addresses, by cluster and address."""
        found = {}
        for at in range(0, len(addresses), ADDRESSES_MAX):
            info = self._select(
                POD_INFO, f'pod_ip=~"{"|".join(map(literal, sorted(addresses)[at : at + ADDRESSES_MAX]))}"'
            )

            def build(seconds: float, info: str = info) -> str:
                return f"group by (cluster, pod_ip, node) ({self._own(over('last', info, seconds))})"

            for row in self._history.ask_whole("nodes", build, span):
                labels = dict(row)
                found[labels.get("cluster", ""), labels.get("pod_ip", "")] = labels.get("node", "")
        return found

    def _with_gpus(self, seconds: float) -> str:
        """PromQL: the pods that requested a GPU at any time."""
        own, of_init = (
            self._own(over("last", self._select(each, ANY_GPU), seconds)) for each in (REQUESTS, INIT_REQUESTS)
        )
        return f"group by ({POD}) ({own} or {of_init})"

    def _own(self, series: str) -> str:
        """PromQL: the pod and node that kube-state-metrics reports.

        Without honor_labels, Prometheus renames these labels, and the others name kube-state-metrics itself.
        """
        if self._is_renamed:
            # Without the labels of kube-state-metrics' own pod, which may have been replaced a moment ago.
            series = f"max without (namespace, pod, container, instance) ({series})"
            for label in ("namespace", "pod", "node", "container"):
                series = f'label_replace({series}, "{label}", "$1", "exported_{label}", "(.+)")'
        return series

    def _select(self, metric: str, *matchers: str) -> str:
        return f"{metric}{{{','.join(filter(None, (self._matcher, *matchers)))}}}"


def workload_of(kind: str, name: str) -> str:
    """Returns the name that users gave: the Deployment of a ReplicaSet, the CronJob of a Job."""
    if kind == "ReplicaSet":
        return HASH.sub("", name)
    return MOMENT.sub("", name) if kind == "Job" else name


def _add_up_pods(
    by_target: Mapping[tuple[str, ...], Mapping[float, Mapping[Target, float]]],
    present: Mapping[Target, Mapping[float, float]],
    window: float,
) -> dict[tuple[PodName, str], dict[float, float]]:
    """Returns GPU-seconds by pod and node, and by start of the window. `by_target`: by the labels OF_REQUEST.

    A pod has the sum of its containers, or the most of its init containers, which run before, if that is more.
    """
    by_pod: defaultdict[tuple[PodName, str], dict[tuple[float, str], tuple[float, float]]] = defaultdict(dict)
    for (cluster, namespace, pod, node, resource, _, init), of_request in by_target.items():
        if not node:  # the pod waits for one
            continue
        of_pod = by_pod[PodName(cluster, namespace, pod), node]
        for start, of_targets in of_request.items():
            # Two kube-state-metrics at the same time report the same pods; one after the other, each a part.
            together = sum(present.get(target, {}).get(start, window) for target in of_targets)
            seconds = (max if together > OVERLAP * window else sum)(of_targets.values())
            others, most = of_pod.get((start, resource), (0.0, 0.0))
            of_pod[start, resource] = (others, max(most, seconds)) if init else (others + seconds, most)
    found: dict[tuple[PodName, str], dict[float, float]] = {}
    for key, of_pod in by_pod.items():
        for (start, _), each in of_pod.items():
            windows = found.setdefault(key, {})
            windows[start] = windows.get(start, 0.0) + max(each)
    return found


def _find_answered(tables: Mapping[str, Table]) -> dict[tuple[Target, float], float]:
    """Returns the share of the scrapes of each target that did not fail, by the start of the window."""
    scrapes = {target_of(labels): values for labels, values in tables["scrapes"].items()}
    return {
        (target_of(labels), start): number / scrapes[target_of(labels)][start]
        for labels, values in tables["answers"].items()
        for start, number in values.items()
        if scrapes.get(target_of(labels), {}).get(start)
    }


def _find_shards(by_target: Mapping[tuple[str, ...], Mapping[float, Mapping[Target, float]]]) -> set[Target]:
    """Targets whose requests no other target reports at any time. Replicas and successors report the same requests."""
    found: set[Target] = set()
    others: set[Target] = set()
    for of_request in by_target.values():
        targets = {target for of_targets in of_request.values() for target in of_targets}
        (others if len(targets) > 1 else found).update(targets)
    return found - others


def _find_blind(tables: Mapping[str, Table], shards: Collection[Target], span: WindowSpan) -> set[tuple[str, float]]:
    """Returns, by cluster, the windows in which no target, or not every shard, answered for most of the time. Omits
    clusters without `up`.
    """
    answered, seen = _find_answered(tables), defaultdict[tuple[str, float], float](float)
    clusters, blind = set(), set()
    for labels, values in tables["presence"].items():
        target = target_of(labels)
        clusters.add(target[0])
        for start, seconds in values.items():
            answers = answered.get((target, start), 0.0)
            seen[target[0], start] += seconds * answers
            if target in shards and seconds * (1.0 - answers) > (1.0 - LOST) * span.window:
                blind.add((target[0], start))
    return blind | {
        (cluster, at) for cluster in clusters for at in _starts(span) if seen[cluster, at] < LOST * span.window
    }


def _starts(span: WindowSpan) -> list[float]:
    return [span.start + number * span.window for number in range(span.windows)]


def _reported(given: Labels, *names: str) -> tuple[str, ...]:
    """Returns the labels `names` as kube-state-metrics reported them. Without honor_labels, Prometheus renames some."""
    labels = dict(given)
    return tuple(labels.get(f"exported_{name}") or labels.get(name, "") for name in names)


def _list_times(walls: Mapping[Labels, float]) -> dict[PodName, list[float]]:
    """Returns times (Unix seconds) by name of the pod. Several pods may have had the same name."""
    found: dict[PodName, list[float]] = {}
    for series, wall in walls.items():
        found.setdefault(_name(series), []).append(wall)
    return found


def _by_node(values: Mapping[Labels, float]) -> dict[tuple[str, str], float]:
    found = [(dict(series), value) for series, value in values.items()]
    return {(labels.get("cluster", ""), labels.get("node", "")): value for labels, value in found}


def _name(given: Labels) -> PodName:
    labels = dict(given)
    return PodName(labels.get("cluster", ""), labels.get("namespace", ""), labels.get("pod", ""))
