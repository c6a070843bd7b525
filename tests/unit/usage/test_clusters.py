"""Clusters of kube-state-metrics and of the exporters, if only one side has the label `cluster`."""

from __future__ import annotations

import pytest

from gpu_exporter.reports.usage.cells import Cell, HolderId, Unit
from gpu_exporter.reports.usage.clusters import ClusterNames, name_nodes
from gpu_exporter.reports.usage.sources.kube import PodName


def cells(*places: tuple[str, str, str]) -> list[Cell]:
    """Units by cluster, node and pod."""
    return [
        Cell(Unit(cluster, node, f"GPU-{n}"), HolderId(cluster, "kubernetes", "ml", pod) if pod else None, 0.0, 1.0, 1)
        for n, (cluster, node, pod) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("theirs", "ours", "node", "cluster"),
    [
        ([("", "n1")], [("east", "n1")], ("", "n1"), "east"),
        ([("", "n1")], [("east", "n1")], ("", "n2"), "east"),  # a node without an exporter
        ([("east", "n1")], [("", "n1")], ("east", "n2"), ""),
        ([("east", "n1")], [("west", "n1")], ("east", "n1"), "east"),  # two names are two clusters
        ([("east", "n1"), ("west", "n1")], [("east", "n1"), ("west", "n1")], ("west", "n1"), "west"),
        ([("", "n1"), ("", "n2")], [("east", "n1.example.org"), ("west", "n2")], ("", "n1"), "east"),
        ([("", "n1"), ("", "n3")], [("east", "n1"), ("west", "n2")], ("", "n3"), ""),
        ([("", "n1")], [("east", "n1"), ("west", "n1")], ("", "n1"), None),
        (
            [("", "n1"), ("west", "n1")],
            [("east", "n1"), ("west", "n1")],
            ("", "n1"),
            "east",
        ),  # the other one has its own
        ([("east", "n1"), ("west", "n2")], [("", "n1")], ("east", "n1"), ""),
        ([("east", "n1"), ("west", "n2")], [("", "n1")], ("west", "n2"), "west"),
    ],
)
def test_the_cluster_of_a_node(
    theirs: list[tuple[str, str]], ours: list[tuple[str, str]], node: tuple[str, str], cluster: str | None
) -> None:
    names = ClusterNames(theirs, cells(*((*place, "") for place in ours)))
    assert names.of_node(*node) == cluster
    assert names.unclear == (set() if cluster is not None else {"n1"})
    assert names.nodes_of("n1") >= (set() if cluster is not None else {("east", "n1"), ("west", "n1")})


def test_a_pod_whose_name_several_clusters_have_is_that_of_none() -> None:
    """Its owner or its end may be those of the other one."""
    names = ClusterNames(
        [("", "n1"), ("", "n2")], cells(("east", "n1", "a"), ("west", "n2", "both"), ("east", "n1", "both"))
    )
    a, both, b, gone = (PodName("", "ml", name) for name in ("a", "both", "b", "gone"))
    assert names.of_pods([(b, "n2")], [a, both, b, gone]) == {a: "east", b: "west"}
    other = ClusterNames([("east", "n1"), ("west", "n2")], cells(("", "n1", ""), ("", "n2", "")))
    east, west = (PodName(cluster, "ml", "both") for cluster in ("east", "west"))
    alone = PodName("east", "ml", "alone")
    assert other.of_pods([(east, "n1"), (west, "n2"), (alone, "n1")], [east, west, alone]) == {alone: ""}


def test_the_clusters_in_which_kube_state_metrics_may_be_blind() -> None:
    names = ClusterNames([("", "n1"), ("west", "n1")], cells(("east", "n1", ""), ("west", "n1", "")))
    assert names.of_cluster("") == {"", "east"}
    assert names.of_cluster("west") == {"west"}
    assert ClusterNames([("", "n1")], cells(("east", "n1", ""))).of_cluster("") == {"east"}
    without = ClusterNames([("east", "n1"), ("west", "n2")], cells(("", "n1", "")))
    assert without.of_cluster("west") == {"west", ""}


def test_an_address_that_two_clusters_have_names_no_node() -> None:
    """Clusters often have the same range of addresses for pods."""
    nodes = {("", "10.0.0.1"): "n1", ("", "10.0.0.2"): "n2"}
    named = name_nodes({("east", "10.0.0.1"), ("west", "10.0.0.1"), ("east", "10.0.0.2")}, nodes)
    assert named == {**nodes, ("east", "10.0.0.2"): "n2"}
    assert name_nodes({("east", "10.0.0.1")}, {("west", "10.0.0.1"): "n1"}) == {("west", "10.0.0.1"): "n1"}
