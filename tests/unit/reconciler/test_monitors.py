"""Which servers of the Prometheus operator select the monitors and rules, and why not."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import yaml
from tests.testbed.memory_api import MemoryApi, as_text

from gpu_exporter.common.promql.absence import Absence
from gpu_exporter.reconciler.kubernetes.client.api import failure
from gpu_exporter.reconciler.kubernetes.monitors import OBJECTS_MAX, OURS, Selection, compare, explain_monitors
from gpu_exporter.reconciler.runtime.targets import Targets
from gpu_exporter.reconciler.runtime.targets import explain_monitors as of_targets

LISTS = ("list_cluster_custom_object", "list_namespaced_custom_object")


class Cluster(MemoryApi):
    """`lists`: objects by plural; a missing plural answers with `status`. `namespaces`: labels by name."""

    def __init__(self, status: int = 404, namespaces: dict[str, dict[str, str]] | None = None, **lists: Any) -> None:
        super().__init__({})
        self.lists, self.status, self.namespaces = lists, status, namespaces or {}
        self.asked: list[tuple[str, ...]] = []

    def _request(self, function: Any, *arguments: Any, **options: Any) -> Generator[bytes, None, None]:
        self.asked.append(arguments)
        if function.__name__ == "read_namespace":
            if arguments[0] not in self.namespaces:
                raise failure(403, '{"message": "forbidden"}')
            yield as_text({"metadata": {"name": arguments[0], "labels": self.namespaces[arguments[0]]}}).encode()
            return
        plural = arguments[-1]
        assert function.__name__ in LISTS
        assert arguments[:2] == ("monitoring.coreos.com", "v1alpha1" if plural == "prometheusagents" else "v1")
        is_server = plural in ("prometheuses", "prometheusagents", "thanosrulers")
        assert options["label_selector"] == ("" if is_server else OURS)
        if plural not in self.lists:
            raise failure(self.status, '{"message": "forbidden"}')
        yield as_text({"metadata": {}, "items": self.lists[plural]}).encode()


def monitor(name: str = "agent", **labels: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "gpu", "name": name, "labels": labels}, "spec": {}}


EVERYWHERE: dict[str, Any] = {}


def server(selector: Any, place: Any = EVERYWHERE, name: str = "kps", part: str = "podMonitor") -> dict[str, Any]:
    spec = {f"{part}Selector": selector, f"{part}NamespaceSelector": place, "serviceMonitorSelector": {}}
    return {"metadata": {"namespace": "monitoring", "name": name}, "spec": spec}


def explain(monitors: list[dict[str, Any]], servers: list[dict[str, Any]]) -> Absence | None:
    return explain_monitors(Cluster(podmonitors=monitors, servicemonitors=[], prometheuses=servers))


def one(api: Cluster, **options: Any) -> Selection:
    (found,) = compare(api, **options)
    return found


def test_a_monitor_without_the_label_that_prometheus_selects_is_named_with_it_and_the_remedy() -> None:
    found = explain([monitor(release="other")], [server({"matchLabels": {"release": "kps"}})])
    assert found is not None
    assert (found.kind, found.seen, found.to_do) == (
        "unselected",
        'PodMonitor gpu/agent is selected by no server: Prometheus monitoring/kps selects {release: "kps"}',
        'Set in the chart\'s values podMonitor: {labels: {release: "kps"}}',
    )


def test_the_remedy_is_yaml_that_keeps_a_text_a_text() -> None:
    found = one(Cluster(podmonitors=[monitor()], prometheuses=[server({"matchLabels": {"example.org/x": "true"}})]))
    _, _, remedy = found.to_do.partition("values ")
    assert yaml.safe_load(remedy) == {"podMonitor": {"labels": {"example.org/x": "true"}}}


def rule(operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "release", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    "selector",
    [{"matchLabels": {"release": "kps"}}, {}, {"matchExpressions": []}, rule("In", "a", "kps"), rule("Exists")],
)
def test_a_monitor_that_is_selected_by_its_labels_is_not_blamed(selector: Any) -> None:
    found = explain([monitor(release="kps")], [server(selector)])
    assert found is not None and (found.kind, found.seen) == (
        "selected",
        "PodMonitor gpu/agent is selected by Prometheus monitoring/kps",
    )


@pytest.mark.parametrize(
    ("selector", "shown"),
    [
        (rule("In", "a"), 'release is one of "a"'),
        (rule("In", "a", "b"), 'release is one of "a", "b"'),
        (rule("NotIn", "x", "kps"), 'release is none of "x", "kps"'),
        (rule("DoesNotExist"), "release is not set"),
        ({"matchExpressions": [{"key": "role", "operator": "Exists"}]}, "role is set"),
        (
            {"matchExpressions": rule("Exists")["matchExpressions"] + rule("In", "a")["matchExpressions"]},
            'release is one of "a"',
        ),
    ],
)
def test_an_expression_that_excludes_it_is_a_sentence(selector: Any, shown: str) -> None:
    found = one(Cluster(podmonitors=[monitor(release="kps")], prometheuses=[server(selector)]))
    assert found[1:] == (
        "unselected",
        f"selected by no server: Prometheus monitoring/kps selects objects whose label {shown}",
        f"Set in the chart's values podMonitor.labels so that label {shown}",
    )


def test_labels_come_before_the_expressions_that_also_exclude_it() -> None:
    selector = {"matchLabels": {"team": "a"}} | rule("In", "a")  # which the chart's labels can also set, afterwards
    found = one(Cluster(podmonitors=[monitor(release="kps")], prometheuses=[server(selector)]))
    assert found.to_do == 'Set in the chart\'s values podMonitor: {labels: {team: "a"}}'


@pytest.mark.parametrize(
    "selector",
    ["odd", {"matchLabels": ["odd"]}, {"matchExpressions": "x"}, rule("In") | {"matchExpressions": [{"values": 1}]}],
)
def test_a_selector_of_another_shape_is_unknown_and_costs_only_its_server(selector: Any) -> None:
    assert explain([monitor()], [server(selector)]) is None
    both = Cluster(podmonitors=[monitor()], prometheuses=[server(selector, name="odd"), server({})])
    assert one(both).seen == "selected by Prometheus monitoring/kps"


def test_a_selector_that_is_not_set_selects_nothing() -> None:
    found = explain([monitor(release="kps")], [server(None)])
    assert found is not None and (found.kind, found.to_do) == (
        "unselected",
        "Set podMonitorSelector of Prometheus monitoring/kps: {} selects all",
    )


def test_one_of_two_servers_that_selects_it_is_enough() -> None:
    servers = [server({"matchLabels": {"release": "a"}}), server({"matchLabels": {"release": "b"}})]
    found = explain([monitor(release="b")], servers)
    assert found is not None and found.kind == "selected"


def test_the_namespace_must_be_selected_too() -> None:
    def found(place: Any, labels: dict[str, str] | None) -> Selection:
        known = {} if labels is None else {"gpu": labels}
        return one(Cluster(namespaces=known, podmonitors=[monitor()], prometheuses=[server({}, place)]))

    team = {"matchLabels": {"team": "a"}}
    assert found(team, {"team": "a"}).state == found({}, None).state == "selected"
    assert found(None, {})[2:] == (
        "selected by no server: Prometheus monitoring/kps has no podMonitorNamespaceSelector, so it selects only in its own "
        "namespace monitoring",
        "Set in the chart's values podMonitor: {namespace: monitoring}",
    )
    assert found(team, {})[2:] == (
        'selected by no server: Prometheus monitoring/kps selects namespaces with {team: "a"}',
        'Give namespace gpu these labels: {team: "a"}',
    )
    name = "kubernetes.io/metadata.name"
    assert found({"matchLabels": {name: "monitoring"}}, {name: "gpu"}).to_do == (
        "Set in the chart's values podMonitor: {namespace: monitoring}"
    )
    both = {"matchLabels": {name: "monitoring", "team": "a"}}
    assert found(both, {name: "gpu"}).to_do == "Set in the chart's values podMonitor: {namespace: monitoring}"
    one_of = {"matchExpressions": [{"key": name, "operator": "In", "values": ["monitoring", "prod"]}]}
    assert found(one_of, {name: "gpu"})[2:] == (
        f'selected by no server: Prometheus monitoring/kps selects namespaces whose label {name} is one of "monitoring", "prod"',
        f'Set in the chart\'s values podMonitor.namespace to a namespace whose label {name} is one of "monitoring", "prod"',
    )
    not_in = {"matchExpressions": [{"key": name, "operator": "NotIn", "values": ["gpu"]}]}
    assert found(not_in, {name: "gpu"}).to_do == (
        f'Set in the chart\'s values podMonitor.namespace to a namespace whose label {name} is none of "gpu"'
    )
    other = {"matchExpressions": [{"key": "team", "operator": "Exists"}]}
    assert found(other, {})[2:] == (
        "selected by no server: Prometheus monitoring/kps selects namespaces whose label team is set",
        "Label namespace gpu so that label team is set",
    )
    assert found(team, None)[1:3] == ("unknown", "the labels of namespace gpu cannot be read")


def test_rules_are_read_by_prometheus_and_thanos_and_monitors_by_agents() -> None:
    kps = server({}, part="podMonitor")
    rules = {"matchLabels": {"release": "kps"}}
    api = Cluster(podmonitors=[monitor()], prometheusrules=[monitor("owners")], prometheuses=[kps], thanosrulers=[])
    states = {each.object: (each.state, each.to_do) for each in compare(api)}
    assert states == {
        "PodMonitor gpu/agent": ("selected", ""),
        "PrometheusRule gpu/owners": ("unselected", "Set ruleSelector of Prometheus monitoring/kps: {} selects all"),
    }
    api.lists["thanosrulers"] = [server({}, part="rule", name="thanos")]
    assert [each.seen for each in compare(api, ["PrometheusRule"])] == ["selected by ThanosRuler monitoring/thanos"]
    api.lists["thanosrulers"] = [server(rules, part="rule", name="thanos")]
    (found,) = compare(api, ["PrometheusRule"])
    assert found.state == "unselected" and 'ThanosRuler monitoring/thanos selects {release: "kps"}' in found.seen
    agent = Cluster(podmonitors=[monitor()], prometheusagents=[server({}, name="agent")])
    assert one(agent).seen == "selected by PrometheusAgent monitoring/agent"


def test_objects_are_read_only_in_the_given_namespaces() -> None:
    api = Cluster(podmonitors=[monitor()], servicemonitors=[], prometheusrules=[], prometheuses=[])
    assert one(api, namespaces=["gpu"]).state == "unknown"
    assert ("monitoring.coreos.com", "v1", "gpu", "podmonitors") in api.asked
    assert ("monitoring.coreos.com", "v1", "podmonitors") not in api.asked


def test_a_cluster_without_a_monitor_is_told_to_install_it() -> None:
    found = explain([], [])
    assert found is not None and found.kind == "unmonitored"


def test_what_cannot_be_read_is_unknown() -> None:
    assert explain([monitor()], []) is None, "no Prometheus of the operator"
    forbidden = Cluster(403, podmonitors=[monitor()], servicemonitors=[], prometheusrules=[])
    assert explain_monitors(forbidden) is None
    assert one(forbidden)[1:] == (
        "unknown",
        "objects of kind Prometheus cannot be read: API server: status 403: forbidden",
        "",
    )
    forbidden.lists["prometheuses"] = [server({"matchLabels": {"release": "kps"}})]
    assert one(forbidden).state == "unknown", "an agent that nobody may read could select it"
    assert explain_monitors(Cluster(500)) is explain_monitors(Cluster(404)) is None
    assert of_targets(Targets(kubernetes=False)) is None
    assert of_targets(Targets()) is None, "no service account"
    assert of_targets(Targets(kubeconfig="/nonexistent")) is None


def test_no_more_than_a_hundred_objects_are_compared() -> None:
    api = Cluster(podmonitors=[monitor(f"m{index}") for index in range(OBJECTS_MAX + 1)], prometheuses=[server({})])
    assert len(compare(api)) == OBJECTS_MAX
