"""The Helm chart: linted, validated, rules and rights match their sources, and wrong values are refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.limits import advise
from tests.rules.others import END as OTHERS_END
from tests.rules.others import FOUND, dcgm_gpu, kube_pod
from tests.rules.promtool import Case, Firing, run
from tests.rules.world import BUSY, IDLE, World
from tests.testbed.chart import CHART, Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import program
from tests.testbed.processes import wait_for
from tests.testbed.programs import prometheus_operator_crds
from tests.testbed.schemas import write_schemas
from tests.testbed.servers import require

pytestmark = pytest.mark.kubernetes
ROOT = CHART.parents[1]
MONITORING = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        **MONITORING,
        "imagePullSecrets": [{"name": "registry"}],
        "gpuResources": [r"example\.com/h100(-.+)?", 'a.b/"#: {x}'],
        "settings": {
            "policy": {"candidate_after": "90m"},
            "policies": [{"name": "lab", "match": {"namespaces": ["lab-*"], "mig": True}, "ceiling": "candidate"}],
            "alerts": {"idle_for": "500ms", "coverage_min": 0.8, "resources": "nvidia_com_gpu"},
        },
        "agent": {
            "runtimeClassName": "nvidia",
            "driverPath": "/usr/lib/nvidia",
            "privileged": True,
            "xidKmsg": True,
            "hostNetwork": True,
            "listenAddress": "127.0.0.1",
            "stateHostPath": "",
            "monitors": ["monitoring/dcgm-exporter-.*"],
            "reservations": ["gpu-sharing"],
            "draPluginPath": "/var/lib/kubelet/plugins/gpu.nvidia.com",
            "extraArgs": ["--log.format=json"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraVolumes": [{"name": "x", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "priorityClassName": "system-node-critical",
            "affinity": {"nodeAffinity": {}},
            "image": {"digest": "sha256:" + 64 * "a"},
            "serviceAccount": {"annotations": {"a": "b"}},
            "dnsPolicy": "Default",
            "annotations": {"a": "b"},
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "podSecurityContext": {"fsGroup": 1},
            "securityContext": {"seLinuxOptions": {"type": "spc_t"}},
            "livenessProbe": {"initialDelaySeconds": 30},
        },
        "nameOverride": "gpus",
        "fullnameOverride": "all-gpus",
        "namespaceOverride": "monitoring",
        "commonLabels": {"team": "platform"},
        "commonAnnotations": {"contact": "gpus@example.org"},
        "global": {"imageRegistry": "registry.example.org:5000", "imagePullSecrets": [{"name": "site"}]},
        "extraManifests": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "namespace": "monitoring"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-other', namespace: monitoring}",
        ],
        "service": {"enabled": True, "labels": {"a": "b"}, "annotations": {"a": "b"}},
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "podMonitor": {
            "enabled": True,
            "namespace": "monitoring",
            "annotations": {"a": "b"},
            "scrapeTimeout": "10s",
            "sampleLimit": 20_000,
            "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
            "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "python_.+"}],
        },
        "prometheusRule": {
            "enabled": True,
            "namespace": "monitoring",
            "annotations": {"a": "b"},
            "without": ["GpuWasteWhileQueued"],
        },
        "dashboard": {"enabled": True, "namespace": "monitoring", "folder": "GPUs", "annotations": {"a": "b"}},
        "reconciler": {
            "serviceAccount": {"name": "marks", "annotations": {"a": "b"}},
            "clusterRoles": ["cluster-monitoring-view"],
            "lease": {"namespace": "kube-system", "name": "gpus"},
            "prometheusURL": "https://prometheus.example.org",
            "prometheus": {
                "caFile": "/x/ca.crt",
                "bearerTokenFile": "/x/token",
                "headers": ["X-Scope-OrgID: team-a"],
            },
            "extraVolumes": [{"name": "x", "secret": {"secretName": "prometheus"}}],
            "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
            "podDisruptionBudget": {"enabled": True},
            "podSecurityContext": {"runAsUser": None, "runAsGroup": None},
            "apply": True,
            "condition": True,
            "replicas": 2,
            "admissionPolicy": True,
            "hostNetwork": True,
            "listenAddress": "127.0.0.1",
            "extraArgs": ["--log.format=json"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "priorityClassName": "high",
        },
        "web": {"secret": "web", "scheme": "HTTPS"},
        "digest": {
            "enabled": True,
            "timeZone": "Europe/Berlin",
            "by": "user",
            "mail": {
                "smtp": "relay.example.org:587",
                "from": "gpus@example.org",
                "to": ["a@example.org", "b@example.org"],
            },
            "extraArgs": ["--output=/x/digest.html", "--format=html"],
        },
    },
    "files": {"settings": {"causes": {"files": "trace"}}, "agent": {"processes": True}},
    "training": {"settings": {"training": {"files": "read"}}, "agent": {"podsPath": "/data/kubelet/pods"}},
    "no-agent": {
        "agent": {"enabled": False},
        "reconciler": {"enabled": False},
        **MONITORING,
        "prometheusRule": {"enabled": True, "otherExporter": "source-dcgm"},
        "networkPolicy": {"enabled": True},
        "openshift": {"scc": True},
    },
    "no-agent-but-reconciler": {"agent": {"enabled": False}, **MONITORING, "service": {"enabled": True}},
    "no-reconciler": {"reconciler": {"enabled": False}, "digest": {"enabled": True}, **MONITORING},
    "services": {"service": {"enabled": True}, "serviceMonitor": {"enabled": True}, "openshift": {"scc": False}},
    "own-accounts": {
        "rbac": {"create": False},
        "agent": {"serviceAccount": {"create": False}},
        "reconciler": {"apply": True, "serviceAccount": {"create": False, "name": "mine"}},
    },
}


@pytest.fixture(scope="module")
def schemas(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> str:
    response = plane.api.rest_client.pool_manager.request("GET", f"{plane.url}/openapi/v2")
    return write_schemas(json.loads(response.data), prometheus_operator_crds(), tmp_path_factory.mktemp("schemas"))


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path)


def conform(schemas: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [str(program("kubeconform")), "-strict", "-summary", "-schema-location", schemas, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_passes_lint_and_schemas(helm: Helm, schemas: str, variant: str, tmp_path: Path) -> None:
    values = tmp_path / "chosen.json"
    values.write_text(json.dumps(VARIANTS[variant]))
    assert "0 chart(s) failed" in helm.run("lint", "--strict", CHART, "--values", values).stdout
    text = helm.template(VARIANTS[variant]).stdout
    done = conform(schemas, text)
    assert done.returncode == 0, done.stdout
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout
    broken = conform(schemas, text.replace("labels:", "labelz:"))
    assert "additional properties 'labelz' not allowed" in broken.stdout


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"agnt": {}}, "'agnt' not allowed"),
        ({"gpuResources": "example.com/h100"}, "got string, want array"),
        ({"gpuResources": [""]}, "minLength: got 0, want 1"),
        ({"agent": {"prot": 1}}, "'prot' not allowed"),
        ({"agent": {"port": "9836"}}, "got string, want integer"),
        ({"settings": {"policy": {"candidate_aftr": "1h"}}}, "'candidate_aftr' not allowed"),
        ({"settings": {"policies": [{"name": "lab", "match": {"namespace": "lab"}}]}}, "'namespace' not allowed"),
        ({"settings": {"policy": {"candidate_after": "1 hour"}}}, "does not match pattern"),
        ({"settings": {"policy": {"candidate_after": "0s"}}}, "does not match pattern"),
        ({"settings": {"policy": {"coverage_min": 90}}}, "maximum: got 90, want 1"),
        ({"settings": {"alerts": {"owners_interval": "20m"}}}, "does not match pattern"),
        ({"reconciler": {"prometheusURL": "prometheus:9090"}}, "does not match pattern"),
        ({"reconciler": {"interval": "0s"}}, "does not match pattern"),
        ({"prometheusRule": {"otherExporter": ["source-dcgm", "compat-dcgm"]}}, "value must be one of"),
        ({"prometheusRule": {"alertsIn": "both"}}, "value must be one of"),
        ({"settings": {"causes": {"files": "trace"}}}, "the agent sees processes only with agent.processes=true"),
        (
            {"settings": {"training": {"files": "read"}}, "agent": {"hostActivity": False}},
            "the agent looks for trainings only with agent.hostActivity=true",
        ),
        ({"web": {"scheme": "https"}}, "value must be one of"),
        ({"podMonitor": {"enabled": True, "tlsConfig": {"serverName": "a"}}}, "set web.scheme=HTTPS"),
        ({"serviceMonitor": {"enabled": True}}, "set service.enabled=true"),
        (
            {"agent": {"enabled": False}, "prometheusRule": {"otherExporter": "source-dcgm"}},
            "alerts report only the holders that it knows; set reconciler.enabled=false",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "service": {"enabled": True}, "podMonitor": {"enabled": True}},
            "enable only one",
        ),
        ({"reconciler": {"prometheus": {"caFile": "/x/ca.crt"}}}, "TLS needs an address with https"),
        (
            {"reconciler": {"prometheusURL": "https://p", "prometheus": {"certFile": "/x/a"}}},
            "certFile and keyFile belong together",
        ),
        (
            {"reconciler": {"prometheus": {"bearerTokenFile": "/x/a", "username": "a"}}},
            "use either bearerTokenFile or username",
        ),
        (
            {"reconciler": {"prometheusURL": "https://u:marker@p"}},
            "set reconciler.prometheus.username and passwordFile",
        ),
        (
            {"reconciler": {"alertmanagerURL": "https://u:marker@p"}},
            "set GPU_EXPORTER_RECONCILE_ALERTMANAGER_URL in reconciler.extraEnv from a Secret",
        ),
        ({"reconciler": {"prometheus": {"headers": ["X-Api-Key: marker"]}}}, "write it into headerFile"),
        ({"agent": {"image": {"digest": "abc"}}}, "does not match pattern"),
        ({"reconciler": {"serviceAccount": {"create": False}}}, "its rights would be those of every pod"),
        (
            {"openshift": {"scc": True}, "agent": {"serviceAccount": {"create": False}}},
            "its rights would be those of every pod",
        ),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name belongs to the chart"),
        (
            {"agent": {"podLabels": {"app.kubernetes.io/instance": "x"}}},
            "app.kubernetes.io/instance belongs to the chart",
        ),
        ({"reconciler": {"podLabels": {"helm.sh/chart": "x"}}}, "helm.sh/chart belongs to the chart"),
        ({"prometheusRule": {"without": ["GpuWasteWhileQeued"]}}, "no alert is called GpuWasteWhileQeued"),
        ({"gpuResources": ["a("]}, "gpuResources: a( is not a regular expression"),
        ({"agent": {"monitors": ["ns/(a"]}}, "agent.monitors: ns/(a is not a regular expression"),
        ({"settings": {"alerts": {"resources": "*a"}}}, "settings.alerts.resources: *a is not a regular expression"),
        ({"agent": {"dnsPolicy": "Cluster"}}, "value must be one of"),
        ({"digest": {"since": "7"}}, "does not match pattern"),
        ({"digest": {"by": "team"}}, "value must be one of"),
        ({"digest": {"mail": {"from": "not an address"}}}, "does not match pattern"),
        ({"digest": {"mail": {"smtp": "relay:25"}}}, "digest.mail: smtp, from and to are needed together"),
        # With these, no pod would work.
        ({"agent": {"listenAddress": "127.0.0.1"}}, "agent.hostNetwork=true"),  # loopback of the pod
        ({"reconciler": {"dnsPolicy": "None"}}, "reconciler.dnsConfig"),
        ({"podMonitor": {"enabled": True, "scrapeTimeout": "30s"}}, "podMonitor.scrapeTimeout"),
        ({"fullnameOverride": "my.gpu"}, "fullnameOverride"),
        ({"settings": {"policy": {"unsupported_max": "1000000h"}}}, "longer than a year"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Helm, values: dict[str, Any], complaint: str) -> None:
    done = helm.template(values, check=False)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "marker" not in done.stderr, "a password"


@pytest.mark.parametrize(
    "alerts",
    [
        {},
        {
            "idle_for": "90m",
            "wait": "30s",
            "coverage_min": 0.8,
            "selector": 'job=~"a: b|c #d"',
            "exclude": 'qos!="x"',
            "grafana": "https://g.example",
        },
    ],
)
def test_the_charts_rules_equal_their_source(helm: Helm, tmp_path: Path, alerts: dict[str, Any]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"alerts": alerts} if alerts else {}))
    build = [sys.executable, "-m", "tools.rules", "--output", str(tmp_path / "rules")]
    subprocess.run([*build, f"--config.file={config}"], cwd=ROOT, check=True, capture_output=True)
    for other in ("", "source-dcgm", "source-nvidia-smi", "compat-dcgm"):
        rule = {"enabled": True, "otherExporter": other}
        objects = helm.objects({**MONITORING, "settings": {"alerts": alerts}, "prometheusRule": rule})
        rendered = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "PrometheusRule"}
        paths = [*(tmp_path / "rules").glob("*.yaml"), *(tmp_path / "rules" / "optional").glob(f"{other}.yaml")]
        built = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in paths}
        assert rendered == {f"gpu-gpu-exporter-{name}": rules for name, rules in built.items()}
        assert len(built) == (8 if other else 7)


def test_without_the_agent_rules_and_dashboards_read_another_exporter(helm: Helm) -> None:
    objects = helm.objects(VARIANTS["no-agent"])
    assert {each["kind"] for each in objects} == {"PrometheusRule", "ConfigMap"}
    maps = [each for each in objects if each["kind"] == "ConfigMap"]
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps) and len(maps) == 4
    assert find(objects, "PrometheusRule", "-source-dcgm")

    objects = helm.objects(VARIANTS["no-agent-but-reconciler"])
    parts = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in objects}
    assert parts == {"reconciler", "config", "rules", "dashboard"}, "of agents that another installation runs"
    assert [each["metadata"]["name"] for each in objects if each["kind"] == "PodMonitor"] == [
        "gpu-gpu-exporter-reconciler"
    ]


@pytest.mark.parametrize("busy", [True, False])
def test_without_the_agent_no_alert_misses_it(helm: Helm, tmp_path: Path, busy: bool) -> None:
    """The alerts of a cluster in which only dcgm-exporter and kube-state-metrics run."""
    require("promtool")
    (rules := tmp_path / "rules").mkdir()
    for each in helm.objects(VARIANTS["no-agent"]):
        if each["kind"] == "PrometheusRule":
            name = each["metadata"]["name"].removeprefix("gpu-gpu-exporter-")
            (rules / f"{name}.yaml").write_text(yaml.safe_dump(each["spec"]))
    world = World(OTHERS_END)
    dcgm_gpu(world, BUSY if busy else IDLE)
    kube_pod(world)
    offer = {"job": "kube-state-metrics", "node": "d1"}
    world.put("kube_node_status_allocatable", {**offer, "resource": "nvidia_com_gpu"}, 1)
    world.put("kube_node_status_condition", {**offer, "condition": "Ready", "status": "true"}, 1)
    firing = [] if busy else [Firing("GpuHolderIdle", FOUND, OTHERS_END, {"pod": "train-0"})]
    holds, text = run([Case("only dcgm-exporter", world, firing, every_s=30)], tmp_path, rules)
    assert holds, text


def test_alerts_are_in_prometheus_or_in_grafana_and_never_in_both(helm: Helm) -> None:
    def names(values: dict[str, Any]) -> tuple[set[str], set[str], set[str]]:
        """Recordings and alerts in Prometheus, alerts in Grafana."""
        objects = helm.objects({**MONITORING, "prometheusRule": {"enabled": True, **values}})
        rules = [
            rule
            for each in objects
            if each["kind"] == "PrometheusRule"
            for group in each["spec"]["groups"]
            for rule in group["rules"]
        ]
        texts = [each["data"] for each in objects if each["metadata"]["name"] == "gpu-gpu-exporter-alerts"]
        copies = [
            rule
            for data in texts
            for group in yaml.safe_load(data["gpu-exporter.yaml"])["groups"]
            for rule in group["rules"]
        ]
        assert all(rule["data"][0]["datasourceUid"] == "mimir-1" for rule in copies)
        return (
            {rule["record"] for rule in rules if "record" in rule},
            {rule["alert"] for rule in rules if "alert" in rule},
            {rule["title"] for rule in copies},
        )

    recordings, alerts, none = names({})
    assert none == set()
    assert len(alerts) == 30
    assert names({"alertsIn": "grafana", "grafana": {"datasource": "mimir-1"}}) == (recordings, set(), alerts)


@pytest.mark.parametrize(
    ("address", "host"), [("", None), ("::", None), ("[::1]", "::1"), ("0.0.0.0", None), ("10.0.0.1", "10.0.0.1")]
)
def test_texts_from_values_are_rendered_unchanged(helm: Helm, address: str, host: str | None) -> None:
    matcher = 'cluster="a #1", job=~"g: b"'
    objects = helm.objects(
        {
            "agent": {"listenAddress": address, "hostNetwork": True},
            "reconciler": {"matcher": matcher, "listenAddress": address, "hostNetwork": True},
        }
    )
    for kind in ("DaemonSet", "Deployment"):
        (container,) = find(objects, kind)["spec"]["template"]["spec"]["containers"]
        assert all(isinstance(each, str) for each in container["args"])
        assert container["readinessProbe"]["httpGet"].get("host") == host
        assert [each for each in container["args"] if each.startswith(f"--web.listen-address={address}:")]
    assert f"--source.matcher={matcher}" in container["args"]


def test_agent_and_reconciler_know_the_same_resources(helm: Helm) -> None:
    def flags(values: dict[str, Any], kind: str) -> list[str]:
        (container,) = find(helm.objects(values), kind)["spec"]["template"]["spec"]["containers"]
        return [each.partition("=")[2] for each in container["args"] if each.startswith("--attribution.resource=")]

    resources = [r"example\.com/h100(-.+)?", 'a.b/"#: {x}']
    for kind in ("DaemonSet", "Deployment"):
        assert flags({"gpuResources": resources}, kind) == resources
        assert flags({}, kind) == []


def test_the_rules_include_a_sites_own_resources(helm: Helm) -> None:
    def rules(values: dict[str, Any], check: bool = True) -> str:
        done = helm.template({"prometheusRule": {"enabled": True}, **values}, check=check)
        return done.stdout if check else done.stderr

    default = '{resource=~"nvidia_com_gpu(_.+)?|nvidia_com_mig_.+"}'
    assert default in rules({})
    own = rules({"gpuResources": [r"example\.com/h100(-.+)?", "a.b/gpu"]})
    assert 'resource=~"nvidia_com_gpu(_.+)?|nvidia_com_mig_.+|example_com_h100(_.+)?|a.b_gpu"' in own
    assert default not in own
    given = {"gpuResources": ["a/[a-z]+"], "settings": {"alerts": {"resources": "nvidia_com_gpu|a_.+"}}}
    assert 'resource=~"nvidia_com_gpu|a_.+"' in rules(given)
    assert "settings.alerts.resources: name the resources" in rules({"gpuResources": ["a/[a-z]+"]}, check=False)


@pytest.mark.parametrize(
    ("reconciler", "hooks"),
    [
        ({}, set()),
        ({"apply": True}, {"post-delete"}),
        ({"apply": True, "removeLabels": False}, set()),
        ({"enabled": False}, set()),
    ],
)
def test_a_cleanup_job_removes_labels_when_the_reconciler_no_longer_writes(
    helm: Helm, reconciler: dict[str, Any], hooks: set[str]
) -> None:
    objects = helm.objects({"reconciler": reconciler})
    jobs = [each for each in objects if each["kind"] == "Job"]
    assert {each["metadata"]["annotations"]["helm.sh/hook"] for each in jobs} == hooks


def test_the_charts_version_is_the_projects_version(helm: Helm) -> None:
    from gpu_exporter.common.version import VERSION

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.parametrize("version", ["0.1.0+4fda46fd8c4e", f"0.1.0-rc.{'9' * 60}+1", f"0.1.0+{'a' * 43}_"])
def test_a_version_with_a_digest_from_flux_becomes_a_valid_label(
    plane: ControlPlane, tmp_path: Path, helm: Helm, version: str
) -> None:
    """Flux adds +DIGEST to the chart's version; the API server refuses objects with such a label."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    text = (chart / "Chart.yaml").read_text("utf-8")
    (chart / "Chart.yaml").write_text(
        re.sub("^version: .*$", f"version: {version.replace('_', '-')}", text, flags=re.M)
    )
    done = helm.run("template", "gpu", chart, "--namespace=default")
    (account, *_) = (each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "ServiceAccount")
    plane.core.create_namespaced_service_account("default", account, dry_run="All")


def test_kubectl_apply_accepts_every_object(helm: Helm) -> None:
    """`kubectl apply` stores each object in its own annotation, and annotations may have 262,144 bytes in total."""
    for each in helm.objects(VARIANTS["everything"]):
        length = len(json.dumps(each, separators=(",", ":")))
        advise(f"bytes of {each['kind']} {each['metadata']['name']}", length, 200_000)
    names = {path.name for path in (CHART / "files" / "dashboards").glob("*.json")}
    maps = [each for each in helm.objects(MONITORING) if each["metadata"]["labels"].get("grafana_dashboard")]
    assert sorted(key for each in maps for key in each["data"]) == sorted(names)


def test_clients_of_a_port_with_tls_use_tls(helm: Helm) -> None:
    endpoint = {"tlsConfig": {"serverName": "gpu-exporter"}, "basicAuth": {"username": {"name": "web", "key": "user"}}}
    values = {"web": {"secret": "web", "scheme": "HTTPS"}, "podMonitor": {"enabled": True, **endpoint}}
    for values_given, scheme in ((values, "HTTPS"), ({"podMonitor": {"enabled": True}}, "HTTP")):
        objects = helm.objects(values_given)
        for kind in ("DaemonSet", "Deployment"):
            pod = find(objects, kind)["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            probes = [container[each]["httpGet"]["scheme"] for each in ("livenessProbe", "readinessProbe")]
            assert probes == [scheme, scheme]
            flag = "--web.config.file=/etc/gpu-exporter-web/web.yaml" in container["args"]
            mounted = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "web"]
            secrets = [each["secret"]["secretName"] for each in pod["volumes"] if each["name"] == "web"]
            assert (flag, mounted, secrets) == (
                (True, ["/etc/gpu-exporter-web"], ["web"]) if scheme == "HTTPS" else (False, [], [])
            )
        for name in ("-agent", "-reconciler"):
            (found,) = find(objects, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
            shown = {key: value for key, value in found.items() if key in ("scheme", *endpoint)}
            assert shown == ({"scheme": "https", **endpoint} if scheme == "HTTPS" else {})


def test_images_come_from_the_sites_registry_and_from_a_digest_where_one_is_given(helm: Helm) -> None:
    def images(values: dict[str, Any]) -> list[str]:
        objects = helm.objects(values)
        pods = [find(objects, kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment")]
        return [pod["containers"][0]["image"] for pod in pods]

    site = {"global": {"imageRegistry": "r.example:5000/"}}
    digest = "sha256:" + 64 * "a"
    assert images({}) == ["localhost/gpu-exporter/agent:0.1.0", "localhost/gpu-exporter/reconciler:0.1.0"]
    assert images(site)[0] == "r.example:5000/gpu-exporter/agent:0.1.0"
    assert images({**site, "agent": {"image": {"repository": "team/agent"}}})[0] == "r.example:5000/team/agent:0.1.0"
    assert images({"agent": {"image": {"digest": digest}}})[0] == f"localhost/gpu-exporter/agent@{digest}"
    pod = find(
        helm.objects(
            {"imagePullSecrets": [{"name": "a"}], "global": {"imagePullSecrets": [{"name": "a"}, {"name": "b"}]}}
        ),
        "DaemonSet",
    )["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy": {"candidate_after": "3h"}},
    {"policy": {"candidate_after": "120m"}},
    {"policy": {"candidate_after": "1h30m"}},
    {"policy": {"candidate_after": "0h0m"}},
    {"policy": {"candidate_after": "1h 30m"}},
    {"policy": {"underused_after": "1d"}},
    {"policy": {"unsupported_max": "1000000h"}},
    {"policy": {"candidate_after": "7200001ms"}},
    {"policy": {"candidate_after": "3h", "underused_after": "4h"}},
    {"policy": {"underused_after": "59m"}},
    {"attribution": {"interval": "10m"}},
    {"attribution": {"interval": "10m"}, "ledger": {"idle_run_unknown_reset": "40m"}},
    {"ledger": {"low_ratio": 0.9}},
    {"ledger": {"low_ratio": 0.2, "high_ratio": 0.1}},
    {"ledger": {"low_ratio": 0.01}},
    {"sampling": {"interval": "100ms"}},
    {"sampling": {"interval": "0.2s"}},
    {"policies": [{"name": "a", "candidate_after": "3h"}]},
    {"policies": [{"name": "a", "candidate_after": "3h", "underused_after": "4h"}]},
    {"policies": [{"name": "a", "underused_after": "30m"}]},
    {"policy": {"candidate_after": "10m"}, "policies": [{"name": "a", "underused_after": "30m"}]},
    {"policies": [{"name": "a", "match": {"mig": True}}, {"name": "a"}]},
    {"policies": [{"name": "a"}, {"name": "b"}]},
    {"policies": [{"name": "policy"}]},
    {"policies": [{"name": "a", "match": {"namespaces": ["x"], "partitions": ["y"]}}]},
    {"policies": [{"name": "a", "exempt": "teaching", "candidate_after": "10m"}]},
    {"actions": {"hour_max": 17}},
    {"policy": {"host_delay_max": "0s"}},
    {"alerts": {"resources": "a("}},
    {"alerts": {"resources": "nvidia_com_gpu|a_.+"}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=json.dumps)
def test_the_chart_refuses_what_check_config_refuses(helm: Helm, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Otherwise the release is installed, and every pod ends with an error."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "gpu_exporter", "check-config", str(config)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    rendered = helm.template({"settings": settings}, check=False)
    assert (rendered.returncode == 0) == (checked.returncode == 0), f"{checked.stderr}\n{rendered.stderr}"
    assert rendered.returncode == 0 or "settings" in rendered.stderr


def test_openshift_admits_the_agents_account_and_chooses_the_reconcilers_uid(plane: ControlPlane, helm: Helm) -> None:
    objects = helm.objects(yaml.safe_load((CHART / "presets" / "openshift.yaml").read_text("utf-8")))
    agent, reconciler = (find(objects, kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
    constraints = find(objects, "SecurityContextConstraints")
    assert constraints["users"] == [f"system:serviceaccount:gpu-exporter:{agent['serviceAccountName']}"]
    kinds = {next(key for key in volume if key != "name") for volume in agent["volumes"]}
    assert kinds <= set(constraints["volumes"])
    assert agent["containers"][0]["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert reconciler["securityContext"] == {"runAsNonRoot": True}
    bound = find(objects, "ClusterRoleBinding", "-cluster-monitoring-view")
    assert (bound["roleRef"]["name"], bound["subjects"][0]["name"]) == (
        "cluster-monitoring-view",
        reconciler["serviceAccountName"],
    )
    assert (
        "--source.tls.ca=/var/run/secrets/kubernetes.io/serviceaccount/service-ca.crt"
        in (reconciler["containers"][0]["args"])
    )
    # Thanos asks the API server whether the bearer of the token has the rights of that role.
    rbac, reviews = client.RbacAuthorizationV1Api(plane.api), client.AuthorizationV1Api(plane.api)
    asked = {"group": "monitoring.coreos.com", "resource": "prometheuses", "subresource": "api", "verb": "create"}
    rule = {"apiGroups": [asked["group"]], "resources": ["prometheuses/api"], "verbs": ["get", "create"]}
    role = {"metadata": {"name": "cluster-monitoring-view"}, "rules": [rule]}
    rbac.create_cluster_role(role)
    user = f"system:serviceaccount:gpu-exporter:{reconciler['serviceAccountName']}"

    def may_query() -> bool:
        review = {"spec": {"user": user, "resourceAttributes": {**asked, "namespace": "openshift-monitoring"}}}
        return bool(reviews.create_subject_access_review(review).status.allowed)

    assert not may_query()
    rbac.create_cluster_role_binding(bound)
    wait_for(may_query, "the right to query")
    rbac.delete_cluster_role_binding(bound["metadata"]["name"])
    rbac.delete_cluster_role("cluster-monitoring-view")


def test_the_address_of_alertmanager_may_come_from_a_secret(helm: Helm) -> None:
    name = "GPU_EXPORTER_RECONCILE_ALERTMANAGER_URL"
    variable = {"name": name, "valueFrom": {"secretKeyRef": {"name": "alertmanager", "key": "url"}}}
    values = {"settings": {"actions": {"mode": "act", "kinds": "stop"}}}
    objects = helm.objects({**values, "reconciler": {"apply": True, "extraEnv": [variable]}})
    (pod,) = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")
    assert pod["containers"][0]["env"] == [variable]
    assert [flag for flag in pod["containers"][0]["args"] if flag.startswith("--alertmanager.url")] == []


def test_every_flag_of_the_chart_is_one_that_the_programs_know(helm: Helm) -> None:
    """Also those of credentials, which only some sites set."""
    prometheus = {name: f"/x/{name}" for name in ("caFile", "certFile", "keyFile", "passwordFile", "headerFile")} | {
        "username": "u"
    }
    values = {**VARIANTS["everything"], "extraManifests": []}
    values["reconciler"] = {
        **values["reconciler"],
        "prometheusURL": "https://p",
        "prometheus": {**prometheus, "headers": ["X-Scope-OrgID: a"]},
    }
    objects = helm.objects({**values, "tests": {"enabled": True}})
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("DaemonSet", "Deployment", "Job")]
    pods += [each["spec"] for each in objects if each["kind"] == "Pod"]
    pods.append(find(objects, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"])
    assert len(pods) == 6
    for pod in pods:
        (container,) = pod["containers"]
        own = container.get("command", ["gpu-exporter", *([] if "agent" in container["image"] else ["reconcile"])])
        command = [sys.executable, "-m", "gpu_exporter", *own[1:], "--help"]
        known = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
        for flag in container["args"]:
            name = flag.split("=")[0].removeprefix("--").removeprefix("no-")
            assert re.search(rf"--(\[no-\])?{re.escape(name)}\b", known), name
