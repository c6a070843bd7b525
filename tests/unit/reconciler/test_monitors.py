"""Which labels of the exporters' PodMonitor the Prometheus of the operator does not select."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from tests.testbed.memory_api import MemoryApi, as_text

from gpu_exporter.common.promql.absence import Absence
from gpu_exporter.reconciler.kubernetes.client.api import failure
from gpu_exporter.reconciler.kubernetes.monitors import OURS, explain_monitors
from gpu_exporter.reconciler.runtime.targets import Targets
from gpu_exporter.reconciler.runtime.targets import explain_monitors as of_targets


class Cluster(MemoryApi):
    """`lists`: objects by plural; a missing plural answers with `status`."""

    def __init__(self, status: int = 403, **lists: list[dict[str, Any]]) -> None:
        super().__init__({})
        self.lists, self.status = lists, status

    def _request(self, function: Any, *arguments: Any, **options: Any) -> Generator[bytes, None, None]:
        group, version, plural = arguments
        assert (function.__name__, group, version) == ("list_cluster_custom_object", "monitoring.coreos.com", "v1")
        assert options["label_selector"] == ("" if plural == "prometheuses" else OURS)
        if plural not in self.lists:
            raise failure(self.status, '{"message": "forbidden"}')
        yield as_text({"metadata": {}, "items": self.lists[plural]}).encode()


def monitor(**labels: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "gpu", "name": "agent", "labels": labels}, "spec": {}}


def server(selector: Any) -> dict[str, Any]:
    spec = {"podMonitorSelector": selector, "serviceMonitorSelector": {}}
    return {"metadata": {"namespace": "monitoring", "name": "kps"}, "spec": spec}


def explain(monitors: list[dict[str, Any]], servers: list[dict[str, Any]]) -> Absence | None:
    return explain_monitors(Cluster(podmonitors=monitors, servicemonitors=[], prometheuses=servers))


def test_a_monitor_without_the_label_that_prometheus_selects_is_named_with_it() -> None:
    found = explain([monitor(release="other")], [server({"matchLabels": {"release": "kps"}})])
    assert found is not None
    assert (found.kind, found.seen) == (
        "unselected",
        "PodMonitor gpu/agent lacks labels that Prometheus monitoring/kps selects: release=kps",
    )


@pytest.mark.parametrize(
    "selector", [{"matchLabels": {"release": "kps"}}, {}, {"matchExpressions": []}, "odd", {"matchLabels": ["odd"]}]
)
def test_a_monitor_that_is_selected_by_its_labels_is_not_blamed(selector: Any) -> None:
    found = explain([monitor(release="kps")], [server(selector)])
    assert found is not None and (found.kind, found.seen) == (
        "selected",
        "a Prometheus selects the labels of PodMonitor gpu/agent",
    )


def test_a_selector_that_is_not_set_selects_nothing() -> None:
    found = explain([monitor(release="kps")], [server(None)])
    assert found is not None and (found.kind, found.seen) == (
        "unselected",
        "Prometheus monitoring/kps selects no PodMonitor, since its podMonitorSelector is not set",
    )


def test_one_of_two_servers_that_selects_it_is_enough() -> None:
    servers = [server({"matchLabels": {"release": "a"}}), server({"matchLabels": {"release": "b"}})]
    found = explain([monitor(release="b")], servers)
    assert found is not None and found.kind == "selected"


def test_a_cluster_without_a_monitor_is_told_to_install_it() -> None:
    found = explain([], [])
    assert found is not None and found.kind == "unmonitored"


def test_what_cannot_be_read_is_unknown() -> None:
    assert explain([monitor()], []) is None, "no Prometheus of the operator"
    assert explain_monitors(Cluster(podmonitors=[monitor()], servicemonitors=[])) is None, (
        "no right to read the servers"
    )
    assert explain_monitors(Cluster(status=404)) is None, "no operator"
    assert of_targets(Targets(kubernetes=False)) is None
    assert of_targets(Targets()) is None, "no service account"
    assert of_targets(Targets(kubeconfig="/nonexistent")) is None
