"""The acceptance test: real image, chart, kubelet, API server, Prometheus and Alertmanager, from the driver to a label.

The commands of the README install it. Only the GPU is simulated: a fake libnvidia-ml.so.1 is mounted in place of the
driver's. The test prints its timeline.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from gpu_exporter.agent.devices.scenario import Scenario, parse_scenario
from gpu_exporter.reconciler.decision.policy import LABEL
from tests.testbed.chart import Helm, find, scrape_config, write_targets
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.gpu_operator import GpuOperator
from tests.testbed.images import Builder
from tests.testbed.node import NODE, Node, start_node, static_pod
from tests.testbed.nvml.build import NAME as LIBRARY
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.programs import prometheus_operator_crds
from tests.testbed.sandbox import SYSCTLS, left_behind
from tests.testbed.schemas import read_crd
from tests.testbed.servers import Prometheus, Webhook, require, start_alertmanager
from tests.testbed.written import ROOT, calls, code_block

pytestmark = [pytest.mark.servers, pytest.mark.kubelet, pytest.mark.kubernetes]
NAMESPACE = RELEASE = "gpu-exporter"  # in the README
THEIR_PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
REGISTRY = "registry.test"  # nothing is pulled from it
IDLE_S = 12
AWAY_MAX_S = 5.0  # the operator's label removes the agent within this time, unless the machine is busy
FIRST_SERIES_MAX_S = 60.0
# Five minutes are promised. The rules are evaluated every second here, and every minute by default, scrapes likewise.
FIRST_PANEL_MAX_S = 300.0 - 60.0 - 15.0
ACTIVITY_MAX_S = 30.0  # a scrape and a cycle take 2 s here; the rest allows for a busy machine


class Switch:
    """A load that the test turns on and off at once."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = float  # seconds since the scenario's start, 0 until it starts
        self._times, self._values, self._sums = [0.0], [0.0], [0.0]

    def set(self, value: float) -> None:
        now = self.now()
        total = self.integral(now)
        self._times, self._values, self._sums = [*self._times, now], [*self._values, value], [*self._sums, total]

    def integral(self, t: float) -> float:
        times, values, sums = self._times, self._values, self._sums
        i = min(bisect.bisect_right(times, t), len(values), len(sums)) - 1
        return sums[i] + (t - times[i]) * values[i]


class Timeline:
    """Prints the events with their time in seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> float:
        now = time.monotonic() - self._began
        sys.stderr.write(f"  {now:6.1f} s  {what}\n")
        return now


def read_readme(prometheus: int, folder: Path) -> tuple[list[list[str]], list[str]]:
    """The README's calls of docker, and the arguments of its `helm install`, with another registry and the test's Prometheus."""
    block = code_block(ROOT / "README.md", "docker build")
    for theirs, ours in ((THEIR_PROMETHEUS, f"http://127.0.0.1:{prometheus}"), ("REGISTRY", REGISTRY)):
        assert theirs in block
        block = block.replace(theirs, ours)
    *docker, (helm, verb, *arguments) = calls(block, ["docker", "helm"], folder)
    assert (helm, verb) == ("helm", "install")
    return docker, arguments


def build_images(docker: list[list[str]], node: Node, say: Timeline) -> None:
    """What these calls of docker do, with buildah. A push puts the image on the node, as a pull by the kubelet would."""
    builder = Builder(node.sandbox)
    builder.build_base()
    say("base image")
    archives: dict[str, Path] = {}
    for call in docker:
        match call:
            case ["docker", "build", "--target", target, "-t", tag, "."]:
                archives[tag] = builder.build_target(target, tag)
            case ["docker", "push", tag]:
                node.import_image(archives.pop(tag))
                say(f"image {tag} built and imported")
            case _:
                raise AssertionError(f"the README calls {call}")
    assert archives == {}


def site_values(agent: int, reconciler: int, plane: ControlPlane) -> dict[str, Any]:
    """What a site adds to the README's command: here short times, ports, and a driver of our own."""
    # Pods have no separate network here, so the node's loopback serves as the network of the cluster's services.
    return {
        "settings": {
            "attribution": {"interval": "1s"},
            "policy": {"candidate_after": f"{IDLE_S}s", "underused_after": f"{2 * IDLE_S}s", "startup_grace": "1s"},
            "alerts": {"idle_for": f"{IDLE_S}s", "wait": "1s", "keep": "1s", "interval": "1s", "owners_interval": "1s"},
        },
        "agent": {
            "runtimeClassName": "",  # the driver of this node is a library of our own
            "hostNetwork": True,
            "listenAddress": "127.0.0.1",
            "port": agent,
            "driverPath": "/var/lib/driver",
            "extraEnv": [{"name": "GPU_EXPORTER_NVML_TABLE", "value": "/driver/table"}],
        },
        "reconciler": {
            "apply": True,
            "hostNetwork": True,
            "listenAddress": "127.0.0.1",
            "port": reconciler,
            "interval": "1s",
            "extraEnv": [
                {"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"},
                {"name": "KUBERNETES_SERVICE_PORT", "value": str(plane.port)},
            ],
        },
        "web": {"secret": "web"},
        "podMonitor": {"interval": "1s"},
        "tests": {"enabled": True},
    }


def agents(plane: ControlPlane) -> list[tuple[str, str]]:
    """Node and phase of each agent's pod."""
    pods = plane.core.list_namespaced_pod(NAMESPACE, label_selector="app.kubernetes.io/component=agent").items
    return [(pod.spec.node_name or "", pod.status.phase) for pod in pods]


def first_panel(plane: ControlPlane) -> tuple[str, str]:
    """Title and query of the first panel of the fleet's dashboard as installed, with every variable at All."""
    maps = plane.core.list_namespaced_config_map(NAMESPACE, label_selector="grafana_dashboard").items
    (text,) = [text for each in maps for name, text in each.data.items() if name == "gpu-fleet.json"]
    panel = next(each for each in json.loads(text)["panels"] if each.get("targets"))
    query = str(panel["targets"][0]["expr"])
    for variable in ("cluster", "namespace", "account"):
        query = query.replace(f"${variable}", ".*")
    assert "$" not in query
    return panel["title"], query


def create_crds(plane: ControlPlane) -> None:
    api = client.ApiextensionsV1Api(plane.api)
    for path in sorted(prometheus_operator_crds().glob("*.yaml")):
        api.create_custom_resource_definition(read_crd(path))
    wait_for(
        lambda: all(
            any(each.type == "Established" and each.status == "True" for each in crd.status.conditions or ())
            for crd in api.list_custom_resource_definition().items
        ),
        "the CRDs",
    )


def release_objects(plane: ControlPlane) -> list[str]:
    """The objects of the release in the cluster."""
    apps, rbac, core = client.AppsV1Api(plane.api), client.RbacAuthorizationV1Api(plane.api), plane.core
    batch, custom = client.BatchV1Api(plane.api), client.CustomObjectsApi(plane.api)
    selector = {"label_selector": "app.kubernetes.io/name=gpu-exporter"}
    lists = [
        apps.list_daemon_set_for_all_namespaces(**selector).items,
        apps.list_deployment_for_all_namespaces(**selector).items,
        batch.list_job_for_all_namespaces(**selector).items,
        core.list_pod_for_all_namespaces(**selector).items,
        core.list_config_map_for_all_namespaces(**selector).items,
        core.list_service_account_for_all_namespaces(**selector).items,
        rbac.list_cluster_role(**selector).items,
        rbac.list_cluster_role_binding(**selector).items,
        rbac.list_role_for_all_namespaces(**selector).items,
        rbac.list_role_binding_for_all_namespaces(**selector).items,
    ]
    names = [f"{type(each).__name__} {each.metadata.name}" for items in lists for each in items]
    for plural in ("podmonitors", "prometheusrules"):
        answer = custom.list_cluster_custom_object("monitoring.coreos.com", "v1", plural)
        names += [f"{plural} {each['metadata']['name']}" for each in answer["items"]]
    secrets = core.list_secret_for_all_namespaces().items
    return names + [f"Secret {each.metadata.name}" for each in secrets]


def test_an_installed_chart_labels_an_idle_pod_and_removes_the_label(
    processes: Processes, nvml_directory: Path, tmp_path: Path
) -> None:
    require("buildah", "mmdebstrap")
    sysctls = {name: Path("/proc/sys", name).read_text() for name in SYSCTLS}
    say = Timeline()
    loads = [Switch(), Switch()]
    scenario = parse_scenario({"gpus": [{"model": "H100"}] * 2})
    played = zip(scenario.gpus, loads, strict=True)
    scenario = Scenario(tuple(dataclasses.replace(gpu, load=load) for gpu, load in played), ())
    uuids = [gpu.uuid for gpu in scenario.gpus]
    with (
        start_control_plane(processes, tmp_path / "control-plane", scheduler=True) as plane,
        start_node(processes, uuids, plane.node) as node,
    ):
        say("control plane and node")
        ports = [free_port() for _ in range(3)]
        docker, arguments = read_readme(ports[2], tmp_path)
        build_images(docker, node, say)
        var_lib = node.sandbox.scratch / "var-lib"
        driver = var_lib / "driver"
        driver.mkdir()
        shutil.copy(nvml_directory / LIBRARY, driver)
        feeder = ScenarioFeeder(scenario, NvmlTable(driver / "table"))
        for load in loads:
            load.now = feeder.stage.now
        feeder.start()
        create_crds(plane)

        helm = Helm(tmp_path, plane.admin)
        arguments += ["--values", str(helm.write_values(site_values(ports[0], ports[1], plane)))]
        objects = [each for each in yaml.safe_load_all(helm.run("template", *arguments).stdout) if each]
        rules = [tmp_path / f"{each['metadata']['name']}.yaml" for each in objects if each["kind"] == "PrometheusRule"]
        for path in rules:
            path.write_text(yaml.safe_dump(find(objects, "PrometheusRule", path.stem)["spec"]), encoding="utf-8")
        webhook = Webhook()
        targets = tmp_path / "targets.json"
        targets.write_text("[]")
        prometheus = Prometheus(
            processes,
            tmp_path / "prometheus",
            {},
            rules=rules,
            alertmanager=start_alertmanager(processes, tmp_path / "alertmanager", webhook.url)[1],
            scrape_configs=[
                scrape_config(find(objects, "PodMonitor", "-agent"), targets),
                scrape_config(find(objects, "PodMonitor", "-reconciler"), targets),
            ],
            port=ports[2],
        )
        operator = GpuOperator(plane)
        before = {path.name for path in var_lib.iterdir()} | {"cni"}  # containerd makes it with the first pod
        plane.core.create_namespace({"metadata": {"name": NAMESPACE}})
        # The kubelet mounts a Secret as links. This one leaves the port open, so that all that reads it goes on.
        plane.core.create_namespaced_secret(
            NAMESPACE, {"metadata": {"name": "web"}, "stringData": {"web.yaml": "{}\n"}}
        )
        asked = say("Prometheus and Alertmanager; helm install")
        helm.run("install", *arguments, "--wait", "--timeout=240s")
        say("helm install --wait has ended")
        write_targets(plane, NAMESPACE, targets)
        (series,) = wait_for(lambda: prometheus.query(f'gpu_up{{uuid="{uuids[0]}"}}') or None, "the first series")
        seen = say("first series in Prometheus")
        assert seen - asked < FIRST_SERIES_MAX_S
        labels = series[0]
        assert (labels["node"], labels["instance"], labels["job"]) == (NODE, NODE, "gpu-exporter")
        assert not {"pod", "namespace", "container", "endpoint"} & set(labels)
        for program in ("exporter", "reconciler"):
            query = f"gpu_{program}_web_config_success == 1"
            wait_for(lambda query=query: prometheus.query(query) or None, f"the web configuration of the {program}")  # type: ignore[misc]
        title, panel = first_panel(plane)
        wait_for(lambda: prometheus.query(panel) or None, f"data of the panel {title}")
        assert say(f"data in the first panel of the fleet's dashboard, {title!r}") - asked < FIRST_PANEL_MAX_S
        assert agents(plane) == [(NODE, "Running")], "nodes without GPUs get no agent"
        helm.run("test", RELEASE, f"--namespace={NAMESPACE}", "--timeout=120s")
        say("helm test has read the evidence")

        loads[0].set(0.9)
        plane.core.create_namespace({"metadata": {"name": "ml"}})
        wait_for(lambda: plane.has_account("ml"), "the namespace's ServiceAccount")
        pod = static_pod("train-0", 1)
        pod["metadata"]["namespace"] = "ml"
        # The kubelet chooses one of the two GPUs; here one pod holds both.
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
        uid = plane.create_pod(pod)
        wait_for(lambda: plane.pod("train-0", "ml")["status"]["phase"] == "Running", "the pod to run")
        say("pod ml/train-0 runs and holds both GPUs")
        info = wait_for(lambda: prometheus.query('gpu_allocation_info{pod="train-0"}') or None, "its allocation")
        say("its allocation is in Prometheus")
        assert {(row["namespace"], row["pod_uid"], row["uuid"]) for row, _ in info} == {("ml", uid, u) for u in uuids}
        driver_of_claims = operator.run_monitor(node, len(uuids))
        say("the operator's monitor claims both GPUs with adminAccess")
        wait_for(lambda: _idle_run(prometheus, uuids[1]) > IDLE_S, "GPU 1 to be idle", each_s=0.5)

        def label() -> str | None:
            return (plane.pod("train-0", "ml")["metadata"].get("labels") or {}).get(LABEL)

        wait_for(lambda: label() == "partial", "the label `partial`: one of two GPUs is idle", each_s=0.2)
        say("label partial: one GPU works, the other is idle")

        quiet = say("the pod falls idle")
        loads[0].set(0.0)
        wait_for(lambda: label() == "candidate", "the label `candidate`", each_s=0.1)
        candidate = say("label candidate")
        wait_for(lambda: label() == "underused", "the label `underused`", each_s=0.1)
        underused = say("label underused")
        assert candidate - quiet >= IDLE_S - 1.5  # a sample from before the change may count as after it
        assert underused - quiet >= 2 * IDLE_S - 1.5
        alert = wait_for(lambda: firing(webhook, "train-0"), "a notification", each_s=0.2)
        say("notification: GpuHolderIdle")
        assert (alert["labels"]["alertname"], alert["labels"]["namespace"]) == ("GpuHolderIdle", "ml")
        assert (alert["labels"]["pod"], alert["labels"]["gpus"]) == ("train-0", "2")

        loads[1].set(0.7)
        worked = say("first activity, on one of the two GPUs")
        wait_for(lambda: label() != "underused", "the label `underused` to go", each_s=0.1)
        gone = say("label underused gone")
        assert gone - worked < ACTIVITY_MAX_S
        wait_for(lambda: label() == "partial", "the label `partial` in its place", each_s=0.1)
        loads[0].set(0.7)
        say("activity on both")
        wait_for(lambda: label() is None, "the label to go", each_s=0.1)
        say("no label")
        wait_for(
            lambda: any(n["status"] == "resolved" for n in webhook.received), "the alert to be resolved", each_s=0.2
        )
        say("alert resolved")
        told = [reason for reason, _ in plane.events("ml", "train-0") if reason.startswith("Gpu")]
        assert told == [
            *("GpuPartial", "GpuCandidate", "GpuUnderused"),
            *("GpuMarkWithdrawn", "GpuPartial", "GpuMarkWithdrawn"),
        ]
        wait_for(lambda: _writes(prometheus) == {"written": 4.0, "withdrawn": 2.0}, "the reconciler's own counters")

        host = wait_for(lambda: found if len(found := _host_work(prometheus)) == 2 else None, "its work on the host")
        say("what the pod does on its CPUs is in Prometheus")
        assert all(0.0 <= ratio < 0.25 for ratio in host)

        paused = operator.label("paused-for-driver-upgrade")
        for load in loads:
            load.set(0.0)
        say("the operator pauses the node for a new driver, and the pod falls idle")
        wait_for(lambda: agents(plane) == [], "the agent to leave the node", each_s=0.1)
        away_s = time.monotonic() - paused
        say(f"the agent is gone, {away_s:.1f} s after the label")
        marks: set[str | None] = set()
        wait_for(
            lambda: marks.add(label()) or time.monotonic() - paused > 3 * IDLE_S, "time without an agent", each_s=0.2
        )
        assert marks == {None}, "marked without evidence"
        restored = operator.label("true")
        wait_for(lambda: agents(plane) == [(NODE, "Running")], "the agent to come back", each_s=0.1)
        say(f"the agent runs again, {time.monotonic() - restored:.1f} s after the label")
        write_targets(plane, NAMESPACE, targets)
        wait_for(lambda: label() == "candidate", "a label again", each_s=0.2)
        say("label candidate again, by the evidence of the new agent")
        # The pod may have been seen idle until the agent was gone.
        assert time.monotonic() - restored > IDLE_S - max(AWAY_MAX_S, away_s), (
            "the time without an agent does not count"
        )
        holders = {(row["namespace"], row["pod"], row["uuid"]) for row, _ in prometheus.query("gpu_allocation_info")}
        assert holders == {("ml", "train-0", uuid) for uuid in uuids}, "the monitor holds nothing"
        driver_of_claims.stop()
        say("helm uninstall")
        helm.run("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait", "--timeout=240s")
        say("helm uninstall has ended")
        assert label() is None, "uninstall withdraws what stands"
        plane.core.delete_namespaced_secret("web", NAMESPACE)  # the site's own
        wait_for(lambda: release_objects(plane) == [], "the release to be gone")
        leases = client.CoordinationV1Api(plane.api).list_namespaced_lease(NAMESPACE).items
        left_leases = [f"{RELEASE}-reconciler", f"{RELEASE}-reconciler-record"]
        assert sorted(each.metadata.name for each in leases) == left_leases, "as docs/kubernetes.md lists"
        left = {path.name for path in var_lib.iterdir()} - before
        assert left == {"gpu-exporter"}  # the state directory, which remains according to NOTES.txt
        feeder.stop()
        webhook.close()
    assert left_behind(node.sandbox.name) == []
    assert {name: Path("/proc/sys", name).read_text() for name in SYSCTLS} == sysctls
    say("everything ended, nothing is left")


def firing(webhook: Webhook, pod: str) -> dict[str, Any] | None:
    """Waits until the alert about a pod has been sent, and returns it."""
    alerts = [alert for notification in webhook.received for alert in notification["alerts"]]
    return next((a for a in alerts if a["labels"].get("pod") == pod and a["status"] == "firing"), None)


def _idle_run(prometheus: Prometheus, uuid: str) -> float:
    rows = prometheus.query(f'gpu_allocation_idle_run_seconds{{uuid="{uuid}"}}')
    return rows[0][1] if rows else 0.0


def _host_work(prometheus: Prometheus) -> list[float]:
    return [value for _, value in prometheus.query('gpu_allocation_host_activity_ratio{pod="train-0"}')]


def _writes(prometheus: Prometheus) -> dict[str, float]:
    counted = 'gpu_reconciler_writes_total{result=~"written|withdrawn"}'
    return {row["result"]: value for row, value in prometheus.query(counted)}
