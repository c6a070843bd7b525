"""The monitors of the Prometheus operator on a real API server, as an administrator and as the reconciler reads them."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.kubernetes.client.api import connect
from gpu_exporter.reconciler.kubernetes.monitors import GROUP, OURS, explain_monitors
from tests.component.pods_bench import Bench
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
KINDS = {"podmonitors": "PodMonitor", "servicemonitors": "ServiceMonitor", "prometheuses": "Prometheus"}


def define(plural: str, kind: str) -> dict[str, Any]:
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": free}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    kinds = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kinds, "metadata": {"name": f"{plural}.{GROUP}"}, "spec": spec}


def test_what_prometheus_selects_is_read_from_the_operators_objects(bench: Bench) -> None:
    admin = str(bench.plane.admin)
    assert explain_monitors(connect(admin)) is None, "without the operator's kinds nothing is known"
    extensions, custom = client.ApiextensionsV1Api(bench.plane.api), client.CustomObjectsApi(bench.plane.api)
    for plural, kind in KINDS.items():
        extensions.create_custom_resource_definition(define(plural, kind))

    def make(plural: str, name: str, spec: dict[str, Any], **labels: str) -> None:
        body = {"apiVersion": f"{GROUP}/v1", "kind": KINDS[plural], "metadata": {"name": name, "labels": labels}}

        def is_made() -> bool:
            try:
                custom.create_namespaced_custom_object(GROUP, "v1", bench.namespace, plural, {**body, "spec": spec})
            except client.ApiException as exc:
                if exc.status != 404:  # the API server does not serve the new kind yet
                    raise
                return False
            return True

        wait_for(is_made, f"{plural} {name}")

    def seen() -> tuple[str, str]:
        found = explain_monitors(connect(admin))
        assert found is not None
        return found.kind, found.seen

    make("prometheuses", "kps", {"podMonitorSelector": {"matchLabels": {"release": "kps"}}})
    wait_for(lambda: explain_monitors(connect(admin)), "the kinds to be served")
    assert seen()[0] == "unmonitored"
    key, _, value = OURS.partition("=")
    make("podmonitors", "agent", {}, **{key: value, "release": "other"})
    place = bench.namespace
    lacks = f"PodMonitor {place}/agent lacks labels that Prometheus {place}/kps selects: release=kps"
    assert seen() == ("unselected", lacks)
    make("prometheuses", "empty", {"podMonitorSelector": {}})
    assert seen() == ("selected", f"a Prometheus selects the labels of PodMonitor {place}/agent")
