"""Matches the clusters of kube-state-metrics with those of the exporters, if only one side has the label `cluster`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from gpu_exporter.reports.usage.attribute import short_name
from gpu_exporter.reports.usage.cells import Cell
from gpu_exporter.reports.usage.sources.kube import PodName

Node = tuple[str, str]  # cluster and name


class ClusterNames:
    """The cluster of the exporters for each node and pod of kube-state-metrics.

    One cluster on both sides is the same cluster. With several clusters, a node without the label is that of the only
    cluster whose exporter shows a node of this name.
    """

    def __init__(self, theirs: Iterable[Node], cells: Iterable[Cell]) -> None:
        """`theirs`: nodes of kube-state-metrics. `cells`: of the exporters."""
        shown: defaultdict[str, set[str]] = defaultdict(set)
        self._pods: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        ours = set()
        for cell in cells:
            ours.add(cell.unit.cluster)
            shown[short_name(cell.unit.node)].add(cell.unit.cluster)
            if (pod := cell.pod or cell.holder) is not None:
                self._pods[pod.namespace, pod.name].add(pod.cluster)
        of_them = {cluster for cluster, _ in theirs}
        self._whole: Mapping[str, str] = {}
        if len(of_them) == len(ours) == 1 and "" in {*of_them, *ours}:
            self._whole = {next(iter(of_them)): next(iter(ours))}
        self._candidates: Mapping[str, set[str]] = {}  # clusters by node, if nodes do not show their cluster
        if "" in of_them - ours:
            self._candidates = {node: of - of_them for node, of in shown.items()}
        self._without = {node for node, of in shown.items() if "" in of} if "" in ours - of_them else set()
        self._ours = ours
        self.unclear: set[str] = set()  # names of nodes that several clusters have

    def of_node(self, cluster: str, node: str) -> str | None:
        """Returns the exporters' cluster of a node. None if several clusters have a node of this name."""
        if cluster in self._whole:
            return self._whole[cluster]
        name = short_name(node)
        if cluster in self._ours:
            return cluster
        if cluster:
            return "" if name in self._without else cluster
        found = self._candidates.get(name, set())
        if len(found) > 1:
            self.unclear.add(name)
            return None
        return next(iter(found), "")

    def of_cluster(self, cluster: str) -> set[str]:
        """Returns the exporters' clusters that may be this one."""
        if cluster in self._whole:
            return {self._whole[cluster]}
        if cluster or cluster in self._ours:
            return {cluster, *([""] if self._without and cluster not in self._ours else [])}
        return {"", *chain.from_iterable(self._candidates.values())}

    def nodes_of(self, name: str) -> set[Node]:
        """Returns the nodes of this name whose cluster is not clear."""
        return {(cluster, name) for cluster in self._candidates.get(name, ())}

    def of_pods(self, requests: Iterable[tuple[PodName, str]], pods: Collection[PodName]) -> dict[PodName, str]:
        """Returns the exporters' cluster of each of these pods, without those whose name several clusters have.

        `requests`: pods with their nodes.
        """
        known = defaultdict(set, {key: set(of) for key, of in self._pods.items()})
        labelled: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for pod, node in requests:
            labelled[pod.namespace, pod.name].add(pod.cluster)
            if (cluster := self.of_node(pod.cluster, node)) is not None:
                known[pod.namespace, pod.name].add(cluster)
        found = {}
        for pod in pods:
            if pod.cluster in self._whole or pod.cluster in self._ours:
                found[pod] = self._whole.get(pod.cluster, pod.cluster)
            elif len(of := known[pod.namespace, pod.name]) == 1 and len(labelled[pod.namespace, pod.name]) < 2:
                found[pod] = next(iter(of))
        return found


def name_nodes(shown: Collection[Node], nodes: Mapping[Node, str]) -> dict[Node, str]:
    """Returns the names of nodes by their cluster and address.

    `shown`: clusters and addresses of the exporters. `nodes`: names of nodes in kube-state-metrics, by cluster and
    address. If only `shown` or only `nodes` has the label `cluster`, the address alone names the node. Addresses that
    several nodes have are left out.
    """
    times = Counter(address for _, address in shown)
    found = dict(nodes)
    for cluster, address in shown:
        others = [(theirs, node) for (theirs, other), node in nodes.items() if other == address]
        if times[address] == len(others) == 1 and "" in (cluster, others[0][0]):
            found[cluster, address] = others[0][1]
    return found
