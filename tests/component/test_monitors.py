"""Which monitors and rules the operator's servers select: with its own definitions, on a real API server, as an
administrator and with the rights of the chart's test.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from gpu_exporter.reconciler.kubernetes.client.api import connect
from gpu_exporter.reconciler.kubernetes.monitors import GROUP, SERVERS, explain_monitors
from tests.component.test_chart_releases import kubectl
from tests.testbed.chart import CHART, RELEASE, Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import program
from tests.testbed.processes import wait_for
from tests.testbed.programs import prometheus_operator_crds
from tests.testbed.schemas import read_crd

pytestmark = pytest.mark.kubernetes
PLACE, OTHER, MONITORING = "gpu-exporter", "other", "monitoring"
KPS = {"matchLabels": {"release": "kps"}}
STACK = CHART / "presets" / "kube-prometheus-stack.yaml"


class Operator:
    """A cluster with the operator's kinds, and the chart's objects without its pods."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        self.helm = Helm(folder, plane.admin)
        self.custom = client.CustomObjectsApi(plane.api)
        self.account = ""
        for name in (PLACE, OTHER, MONITORING):
            if not any(each.metadata.name == name for each in plane.core.list_namespace().items):
                plane.core.create_namespace({"metadata": {"name": name}})

    def define(self, *crds: Path) -> None:
        api = client.ApiextensionsV1Api(self.plane.api)
        known = api.list_custom_resource_definition().items
        for path in crds:
            crd = read_crd(path)
            if not any(crd["metadata"]["name"] == each.metadata.name for each in known):
                api.create_custom_resource_definition(crd)
            version, plural = crd["spec"]["versions"][0]["name"], crd["spec"]["names"]["plural"]
            wait_for(lambda version=version, plural=plural: self.serves(version, plural), f"{plural} to be served")  # type: ignore[misc]

    def serves(self, version: str, plural: str) -> bool:
        try:
            self.custom.list_cluster_custom_object(GROUP, version, plural)
        except client.ApiException as exc:
            assert exc.status in (404, 503)
            return False
        return True

    def serve(self, kind: str, name: str, **spec: Any) -> None:
        """Make or replace a server of the operator."""
        version, plural = SERVERS[kind]
        body = {"apiVersion": f"{GROUP}/{version}", "kind": kind, "metadata": {"name": name, "namespace": MONITORING}}
        done = kubectl(self.plane, "apply", "--validate=strict", "-f", "-", text=json.dumps({**body, "spec": spec}))
        assert done.returncode == 0, done.stderr
        assert plural in done.stdout.replace(kind.lower(), plural)

    def release(self, **values: Any) -> dict[str, Any]:
        """Apply monitors, rules and the test's rights. Returns the container of its pod."""
        text = self.helm.run(
            *("template", RELEASE, CHART, f"--namespace={PLACE}", "--values", STACK),
            *("--values", self.helm.write_values(values)),
            *("--show-only", "templates/monitors.yaml", "--show-only", "templates/rules.yaml"),
            *("--show-only", "templates/tests/monitors.yaml"),
        ).stdout
        done = kubectl(self.plane, "apply", "--server-side", "-f", "-", text=text)
        assert done.returncode == 0, done.stderr
        pod = find(
            self.helm.objects({"tests": {"enabled": True}, "podMonitor": {"enabled": True}}), "Pod", "-test-monitors"
        )
        self.account = pod["spec"]["serviceAccountName"]
        (container,) = pod["spec"]["containers"]
        return dict(container)

    def check(self, container: dict[str, Any]) -> tuple[int, list[str]]:
        """What the test's container prints with its account, and its exit code."""
        body = {"spec": {"expirationSeconds": 3600}}
        token = self.plane.core.create_namespaced_service_account_token(self.account, PLACE, body).status.token
        content = yaml.safe_load(self.plane.admin.read_text("utf-8"))
        content["users"][0]["user"] = {"token": token}
        kubeconfig = self.folder / "account.kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(content), "utf-8")
        command = [sys.executable, "-m", "gpu_exporter", *container["command"][1:], *container["args"]]
        command.append(f"--kubernetes.kubeconfig={kubeconfig}")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Operator:
    return Operator(plane, tmp_path)


def test_the_charts_test_names_what_no_prometheus_selects(operator: Operator) -> None:
    admin = str(operator.plane.admin)
    assert explain_monitors(connect(admin)) is None, "without the operator's kinds nothing is known"
    crds = prometheus_operator_crds()
    operator.define(*(crds / f"{name}.yaml" for name in ("podmonitors", "servicemonitors", "prometheusrules")))
    found = explain_monitors(connect(admin))
    assert found is not None and found.kind == "unmonitored"

    container = operator.release()
    code, lines = operator.check(container)
    objects = len(lines)
    assert code == 0 and objects == 2 + len(list((CHART / "files" / "rules").glob("*.yaml")))
    assert {line.partition(":")[0] for line in lines} == {"unknown"}, "no Prometheus of the operator"

    operator.define(*sorted((crds / "servers").glob("*.yaml")))
    operator.serve("Prometheus", "kps", podMonitorSelector=KPS, ruleSelector=KPS, podMonitorNamespaceSelector={})
    code, lines = operator.check(container)
    assert code == 2
    assert lines[0] == (
        f"unselected: PodMonitor {PLACE}/gpu-gpu-exporter-agent: selected by no server: "
        f'Prometheus {MONITORING}/kps selects {{release: "kps"}}'
    )
    assert lines[objects:] == [
        'Set in the chart\'s values podMonitor: {labels: {release: "kps"}}',
        'Set in the chart\'s values prometheusRule: {labels: {release: "kps"}}',
    ]
    found = explain_monitors(connect(admin))
    assert found is not None and (found.kind, found.to_do) == ("unselected", lines[objects])

    # As the first remedies say; now the namespace of rules is wrong.
    labels = {"labels": {"release": "kps"}}
    operator.release(podMonitor=labels, prometheusRule=labels)
    code, lines = operator.check(container)
    assert (code, lines[0]) == (
        2,
        f"selected: PodMonitor {PLACE}/gpu-gpu-exporter-agent: selected by Prometheus {MONITORING}/kps",
    )
    assert lines[objects:] == [f"Set in the chart's values prometheusRule: {{namespace: {MONITORING}}}"]

    # A server of another team selects nothing of this; one that evaluates rules of labelled namespaces does.
    team = {"matchLabels": {"gpu": "yes"}}
    operator.serve("Prometheus", "other", podMonitorSelector={}, ruleSelector={})
    operator.serve("ThanosRuler", "ruler", queryEndpoints=["q"], ruleSelector=KPS, ruleNamespaceSelector=team)
    assert operator.check(container)[0] == 2
    operator.plane.core.patch_namespace(PLACE, {"metadata": {"labels": {"gpu": "yes"}}})
    code, lines = operator.check(container)
    assert (code, len(lines), {line.partition(":")[0] for line in lines}) == (0, objects, {"selected"})
    assert lines[-1].endswith(f"selected by ThanosRuler {MONITORING}/ruler")

    # An account without the rights finds nothing wrong.
    operator.account = "default"
    code, (line,) = operator.check(container)
    assert (code, line.partition(":")[0]) == (0, "unknown") and "403" in line


def test_the_rights_of_the_test_are_read_only_and_gone_with_it(operator: Operator) -> None:
    crds = prometheus_operator_crds()
    operator.define(*(crds / f"{name}.yaml" for name in ("podmonitors", "prometheusrules", "servers/prometheuses")))
    operator.serve("Prometheus", "kps", podMonitorSelector=KPS, ruleSelector=KPS)
    where = f"--namespace={OTHER}"
    enabled = "podMonitor.enabled=true,prometheusRule.enabled=true,tests.enabled=true"
    notes = operator.helm.run("install", "two", CHART, where, "--set", enabled).stdout
    assert "is set (podMonitor.labels, prometheusRule.labels)" in notes
    _, *shown = shlex.split(next(line for line in notes.splitlines() if "kubectl get prometheus " in line))
    selectors = kubectl(operator.plane, *shown).stdout
    assert f'{MONITORING}/kps podMonitorSelector={{"matchLabels":{{"release":"kps"}}}}' in selectors
    labelled = operator.helm.run("upgrade", "two", CHART, where, "--values", STACK).stdout
    assert "No label for the Prometheus operator" not in labelled
    mine = ("get", "clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,pods", "-A")
    names = [*mine, "-l", "app.kubernetes.io/component=test-monitors,app.kubernetes.io/instance=two", "--output=name"]
    assert kubectl(operator.plane, *names).stdout == ""
    # No kubelet runs the pods: they end as a kubelet would report it, the second one with a fault.
    test = subprocess.Popen(
        [str(program("helm")), "test", "two", where, "--timeout=60s", f"--kubeconfig={operator.plane.admin}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for name, phase in (("two-gpu-exporter-test", "Succeeded"), ("two-gpu-exporter-test-monitors", "Failed")):
            wait_for(lambda name=name: kubectl(operator.plane, "get", "pod", name, where).returncode == 0, name)  # type: ignore[misc]
            if phase == "Failed":
                rules = json.loads(kubectl(operator.plane, "get", "clusterroles", *names[3:5], "--output=json").stdout)
                (role,) = rules["items"]
                assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list"}
            operator.plane.core.patch_namespaced_pod_status(name, OTHER, {"status": {"phase": phase}})
        output, _ = test.communicate(timeout=60)
    finally:
        test.kill()
    assert test.returncode != 0 and "two-gpu-exporter-test-monitors" in output
    assert kubectl(operator.plane, *names).stdout.split() == ["pod/two-gpu-exporter-test-monitors"], "its log"
