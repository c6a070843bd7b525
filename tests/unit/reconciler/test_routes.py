"""Routes of a namespace: the index of selectors finds what a comparison with each selector finds; odd objects are named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.memory_api import MemoryApi

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reconciler.kubernetes.around.kinds import SERVING_STACKS
from gpu_exporter.reconciler.kubernetes.client.api import Budget
from gpu_exporter.reconciler.kubernetes.client.lean import SPEC_GROUP, weigh
from gpu_exporter.reconciler.kubernetes.client.namespace import _view_front
from gpu_exporter.reconciler.kubernetes.client.routes import (
    NO_ROUTE,
    Pool,
    Route,
    Routes,
    read_routes,
    trim_endpoints,
    trim_pool,
    trim_scaler,
    trim_service,
)
from gpu_exporter.reconciler.kubernetes.owners import Kinds

VALUES = Path(__file__).parents[3] / "helm" / "gpu-exporter" / "values.yaml"
ITEMS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("12"), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "name", "selector", "matchLabels", "labels", "endpoints", "targetRef", "a"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FAULTS = (AttributeError, LookupError, TypeError, ValueError)


@given(st.lists(st.tuples(ITEMS.filter(bool), st.booleans()), max_size=8), ITEMS, st.sampled_from(["", "s0", "s1"]))
def test_the_index_finds_what_a_comparison_with_each_selector_finds(
    selectors: list[tuple[dict[str, str], bool]], labels: dict[str, str], subdomain: str
) -> None:
    routes = Routes()
    pools = [
        Pool(f"s{at}", Route(f"Service/s{at}", is_weak), frozenset(selector.items()))
        for at, (selector, is_weak) in enumerate(selectors)
    ]
    for pool in pools:
        routes.select(pool)
    found = routes.find({"uid": "u", "labels": labels}, (), subdomain)
    matching = [
        pool
        for pool in pools
        if all(labels.get(key) == value for key, value in pool.selector)
        and not (pool.route.is_weak and pool.name == subdomain)
    ]
    assert (found == NO_ROUTE) == (not matching)
    assert not matching or found in [pool.route for pool in matching]
    assert not found.title or found.is_weak == all(pool.route.is_weak for pool in matching)


def made_by(version: str, kind: str) -> list[dict[str, Any]]:
    return [{"apiVersion": version, "kind": kind, "name": "x", "uid": "u", "controller": True}]


HEAD = {"ray.io/node-type": "head", "ray.io/cluster": "c"}


@pytest.mark.parametrize(
    ("maker", "spec", "title"),
    [
        (None, {"selector": {"a": "1"}}, "Service/s"),
        (None, {"selector": {"a": "1"}, "clusterIP": "None"}, "headless Service/s"),
        (("sparkoperator.k8s.io/v1beta2", "SparkApplication"), {"selector": {"spark-role": "driver"}}, ""),
        (("v1", "Pod"), {"selector": {"spark-role": "driver"}, "clusterIP": "None"}, ""),
        (("v1", "Pod"), {"selector": {"a": "1"}}, "Service/s"),
        (("kubeflow.org/v1", "PyTorchJob"), {"selector": {"a": "1"}, "clusterIP": "None"}, ""),
        (("ray.io/v1", "RayCluster"), {"selector": HEAD}, ""),
        (("ray.io/v1", "RayCluster"), {"selector": HEAD, "clusterIP": "None"}, ""),
        (("ray.io/v1", "RayCluster"), {"selector": {"ray.io/cluster": "c"}, "clusterIP": "None"}, ""),
        (("ray.io/v1", "RayCluster"), {"selector": {"ray.io/serve": "true"}}, "Service/s"),
        (("serving.kserve.io/v1beta1", "InferenceService"), {"selector": {"a": "1"}}, "Service/s"),
    ],
)
def test_services_that_batch_controllers_make_for_themselves_show_no_server(
    maker: tuple[str, str] | None, spec: dict[str, Any], title: str
) -> None:
    service = {"metadata": {"name": "s", "ownerReferences": made_by(*maker) if maker else []}, "spec": spec}
    assert trim_service(service).route.title == title


def test_the_autoscaler_of_an_elastic_training_job_shows_no_server() -> None:
    target = {"scaleTargetRef": {"kind": "PyTorchJob", "name": "j"}}
    own = {"metadata": {"name": "h", "ownerReferences": made_by("kubeflow.org/v1", "PyTorchJob")}, "spec": target}
    assert trim_scaler(own) == (("PyTorchJob", "j"), "")
    assert trim_scaler({"metadata": {"name": "h"}, "spec": target})[1] == "HorizontalPodAutoscaler/h"


def test_many_services_with_one_selector_cost_a_pod_no_more_than_two() -> None:
    routes = Routes()
    for at in range(1000):
        routes.select(Pool(f"s{at}", Route(f"headless Service/s{at}", is_weak=True), frozenset({("app", "a")})))
    assert sum(map(len, routes._by_item.values())) == 2
    assert routes.find({"uid": "u", "labels": {"app": "a"}}, (), "s0").title == "headless Service/s1"


def test_routes_of_others_take_no_place_of_an_honest_one() -> None:
    """Anybody who can create Services can name a Job as the controller of one."""
    routes = Routes()
    for name, route in (("a1", NO_ROUTE), ("a2", NO_ROUTE), ("a3", Route("headless Service/a3", is_weak=True))):
        routes.select(Pool(name, route, frozenset({("app", "a")})))
        routes.point(["u"], Pool(name, route, frozenset()))
    by_selector, by_endpoint = {"uid": "x", "labels": {"app": "a"}}, {"uid": "u"}
    assert routes.find(by_selector, (), "").title == routes.find(by_endpoint, (), "").title == "headless Service/a3"
    routes.select(Pool("web", Route("Service/web"), frozenset({("app", "a")})))
    routes.point(["u"], Pool("web", Route("Service/web"), frozenset()))
    assert routes.find(by_selector, (), "") == routes.find(by_endpoint, (), "") == Route("Service/web")


def test_an_endpoint_without_a_uid_counts_by_its_address() -> None:
    endpoint = {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "p"}}
    labels = {"kubernetes.io/service-name": "s"}
    assert trim_endpoints({"metadata": {"name": "e", "labels": labels}, "endpoints": [endpoint]}) == ("s", ["10.0.0.1"])


def test_a_served_pod_without_gpus_keeps_the_group_of_its_spec() -> None:
    pod = {"metadata": {"name": "front", "uid": "u", "labels": {"app": "a"}}, "spec": {"containers": []}}
    assert _view_front(pod, Route("Service/s")) is None, "it is in no gang"
    pod["spec"]["workloadRef"] = {"name": "w", "podGroup": "g"}
    front = _view_front(pod, Route("Service/s"))
    assert front is not None and front.metadata[SPEC_GROUP] == "w/g/"


def test_the_memory_of_a_selector_is_counted() -> None:
    selector = {f"k{at}": "x" * 100 for at in range(1000)}
    assert weigh(trim_service({"metadata": {"name": "s"}, "spec": {"selector": selector}})) > 100_000


@pytest.mark.parametrize("trim", [trim_service, trim_pool, trim_endpoints, trim_scaler])
@given(found=JSON)
def test_any_object_is_read_or_is_malformed(trim: Any, found: Any) -> None:
    with contextlib.suppress(*FAULTS):
        assert len(trim(found)) >= 2


def named(name: str, **parts: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ml"}, **parts}


@pytest.mark.parametrize(
    ("objects", "unread"),
    [
        ({"Service": [named("s", spec={"selector": {"app": "a"}})]}, ""),
        ({"Service": [named("s", spec={"selector": 7})]}, "Service ml/s cannot be read (it cannot be parsed ("),
        (
            {"HorizontalPodAutoscaler": [named("h", spec={})]},
            "HorizontalPodAutoscaler ml/h cannot be read (it cannot be parsed (",
        ),
        ({"EndpointSlice": [named("e", endpoints=[7])]}, "EndpointSlice ml/e cannot be read (it cannot be parsed ("),
    ],
)
def test_an_odd_route_is_named_because_any_pod_may_be_behind_it(objects: dict[str, list[Any]], unread: str) -> None:
    api, clock = MemoryApi(objects), ManualClock()
    found = read_routes(api, Kinds(api, clock), "ml", lambda _: None, Budget(1 << 20, clock.monotonic() + 9.0, clock))
    assert found.unread.startswith(unread) and bool(found.unread) == bool(unread)


def test_the_chart_grants_the_reading_of_each_kind_that_shows_a_server() -> None:
    granted = yaml.safe_load(VALUES.read_text("utf-8"))["reconciler"]["ownerResources"]
    missing = [
        (group, kind)
        for group, kinds in SERVING_STACKS.items()
        for kind in kinds
        if f"{kind.lower()}s" not in granted.get(group, ())
    ]
    assert missing == []
