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
from tests.testbed.chart import CHART, Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import program
from tests.testbed.processes import wait_for
from tests.testbed.programs import prometheus_operator_crds
from tests.testbed.schemas import write_schemas

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
    },
    "files": {"settings": {"causes": {"files": "trace"}}, "agent": {"processes": True}},
    "training": {"settings": {"training": {"files": "read"}}, "agent": {"podsPath": "/data/kubelet/pods"}},
    "no-reconciler": {"reconciler": {"enabled": False}, **MONITORING},
    "services": {"service": {"enabled": True}, "serviceMonitor": {"enabled": True}, "openshift": {"scc": False}},
    "own-accounts": {
        "rbac": {"create": False},
        "agent": {"serviceAccount": {"create": False}},
        "reconciler": {"apply": True, "serviceAccount": {"create": False, "name": "mine"}},
    },
}

UID_OF_POD = {
    "name": "GPU_EXPORTER_ATTRIBUTION_POD_UID",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
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
    broken = conform(schemas, text.replace("updateStrategy:", "updateStrategi:"))
    assert "additional properties 'updateStrategi' not allowed" in broken.stdout


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
    assert len(alerts) == 31
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


def test_the_agent_has_no_rights_and_the_dry_run_may_only_read_pods(helm: Helm) -> None:
    objects = helm.objects({})
    agent = find(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert agent["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostNetwork", "hostIPC"} & {key for key, value in agent.items() if value}
    (container,) = agent["containers"]
    assert container["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    writable = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["state"]
    (role,) = [each for each in objects if each["kind"] == "ClusterRole" and "annotations" not in each["metadata"]]
    assert role["metadata"]["name"].endswith("-reconciler")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list"}
    assert all("*" not in (*rule["resources"], *rule["apiGroups"]) for rule in role["rules"])
    reconciler = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert reconciler["automountServiceAccountToken"] is True
    assert "--apply" not in reconciler["containers"][0]["args"]


def test_the_agent_sees_host_processes_only_if_enabled(helm: Helm) -> None:
    """In the host's PID namespace uid 0 may end every process of uid 0, without any capability."""
    asked = find(helm.objects({"agent": {"processes": True}}), "DaemonSet")["spec"]["template"]["spec"]
    assert asked["hostPID"] is True
    assert "--attribution.process" in asked["containers"][0]["args"]
    assert "process" not in json.dumps(find(helm.objects({}), "DaemonSet"))


def test_the_agent_reads_host_cgroups_unless_disabled(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        return find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]

    pod = agent({})
    assert "--path.cgroup=/host/cgroup" in pod["containers"][0]["args"]
    mount = {"name": "cgroup", "mountPath": "/host/cgroup", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup", "type": "Directory"}} in pod["volumes"]
    assert UID_OF_POD in pod["containers"][0]["env"]
    without = json.dumps(agent({"hostActivity": False}))
    assert "cgroup" not in without and UID_OF_POD["name"] not in without


def test_the_agent_gets_the_settings_for_monitors_and_claims(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        return find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]

    folder = "/var/lib/kubelet/plugins/gpu.nvidia.com"
    pod = agent({"monitors": ["monitoring/dcgm-.*"], "draPluginPath": folder})
    (container,) = pod["containers"]
    assert {"--attribution.monitor=monitoring/dcgm-.*", "--attribution.claims=/host/dra-plugin"} <= {*container["args"]}
    assert {"name": "dra-plugin", "mountPath": "/host/dra-plugin", "readOnly": True} in container["volumeMounts"]
    assert {"name": "dra-plugin", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}} in pod["volumes"]
    assert "dra-plugin" not in json.dumps(agent({}))
    for refused in ({"monitors": ["dcgm-exporter"]}, {"monitors": [".*/dcgm"]}, {"draPluginPath": "plugins"}):
        assert helm.template({"agent": refused}, check=False).returncode != 0


def test_the_agent_reads_the_kernel_log_only_if_enabled_and_privileged(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        pod = find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]
        return {"volumes": pod["volumes"], **pod["containers"][0]}

    mount = {"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True}
    asked = agent({"xidKmsg": True, "privileged": True})
    assert "--collector.xid.kmsg" in asked["args"]
    assert mount in asked["volumeMounts"]
    assert {"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}} in asked["volumes"]
    assert asked["securityContext"]["privileged"] is True
    for values in ({}, {"privileged": True}):
        text = json.dumps(agent(values))
        assert "kmsg" not in text
    refused = helm.template({"agent": {"xidKmsg": True}}, check=False)
    assert refused.returncode != 0
    assert "agent.xidKmsg: only privileged containers may read /dev/kmsg; set agent.privileged=true" in refused.stderr


@pytest.mark.parametrize(
    ("apply", "condition", "lease"),
    [
        (False, False, {}),
        (False, True, {}),
        (True, False, {}),
        (True, True, {}),
        (False, False, {"namespace": "coordination", "name": "gpus"}),
        (True, True, {"namespace": "coordination", "name": "gpus"}),
        (True, False, {"name": "gpus"}),
    ],
    ids=[
        "dry run",
        "dry run, condition",
        "apply",
        "apply, condition",
        "dry run, lease",
        "apply, lease",
        "name of a lease",
    ],
)
def test_the_reconciler_has_the_rights_it_uses_and_no_others(
    plane: ControlPlane, helm: Helm, apply: bool, condition: bool, lease: dict[str, str]
) -> None:
    about = {"serviceAccount": {"name": "marks"}} if lease else {}
    objects = helm.objects({"reconciler": {"apply": apply, "condition": condition, "lease": lease, **about}})
    args = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert ("--kubernetes.condition" in args) is (apply and condition), "the command refuses it without --apply"
    rbac = client.RbacAuthorizationV1Api(plane.api)
    role, binding = find(objects, "ClusterRole", "-reconciler"), find(objects, "ClusterRoleBinding", "-reconciler")
    rbac.create_cluster_role(role)
    rbac.create_cluster_role_binding(binding)
    local = [find(objects, kind, "-reconciler") for kind in ("Role", "RoleBinding")]
    create = {"Role": rbac.create_namespaced_role, "RoleBinding": rbac.create_namespaced_role_binding}
    home = local[0]["metadata"]["namespace"]
    if home not in {each.metadata.name for each in plane.core.list_namespace().items}:
        plane.core.create_namespace({"metadata": {"name": home}})
    for each in local:
        create[each["kind"]](each["metadata"]["namespace"], each)
    (account,) = [
        each["metadata"]
        for each in objects
        if each["kind"] == "ServiceAccount"
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == "reconciler"
    ]
    assert account["name"] == "marks" or not lease
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"

    def may(
        verb: str, resource: str, group: str = "", subresource: str = "", namespace: str = "ml", name: str = ""
    ) -> bool:
        attributes = {"verb": verb, "resource": resource, "group": group, "namespace": namespace, "name": name}
        attributes["subresource"] = subresource
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = client.AuthorizationV1Api(plane.api).create_subject_access_review(review)
        return bool(answer.status.allowed)

    reads = [
        ("get", "pods"),
        ("list", "pods"),
        ("get", "namespaces"),
        ("list", "services"),
        ("list", "endpointslices", "discovery.k8s.io"),
        ("list", "horizontalpodautoscalers", "autoscaling"),
        ("get", "jobs", "batch"),
        ("get", "statefulsets", "apps"),
        ("get", "pytorchjobs", "kubeflow.org"),
    ]
    status = ("patch", "pods", "", "status")
    own = lease.get("name", "gpu-gpu-exporter-reconciler")
    assert home == lease.get("namespace", account["namespace"])
    assert f"--kubernetes.lease={home}/{own}" in args
    pause = ("get", "leases", "coordination.k8s.io", "", home, own)  # a dry run reads the pause
    record = [
        (verb, "leases", "coordination.k8s.io", "", home, f"{own}-record" if verb != "create" else "")
        for verb in ("create", "get", "update")
    ]
    writes = [
        ("patch", "pods"),
        ("update", "leases", "coordination.k8s.io", "", home, own),
        ("create", "events", "events.k8s.io"),
        *([status] if apply and condition else []),
    ]
    allowed = [*reads, pause, *record, *writes] if apply else [*reads, pause, *record]
    denied = [
        *(() if apply else writes),
        ("delete", "pods"),
        ("update", "pods"),
        ("create", "pods"),
        ("watch", "pods"),
        ("create", "pods", "", "eviction"),
        ("create", "pods", "", "exec"),
        *(() if apply and condition else (status,)),
        ("get", "leases", "coordination.k8s.io", "", home, "another"),
        ("update", "leases", "coordination.k8s.io", "", home, "another"),
        ("create", "leases", "coordination.k8s.io", "", "ml"),
        *([("create", "leases", "coordination.k8s.io", "", account["namespace"])] if "namespace" in lease else []),
        ("delete", "leases", "coordination.k8s.io", "", home, own),
        ("get", "secrets"),
        ("list", "nodes"),
        ("list", "jobs", "batch"),
        ("patch", "jobs", "batch"),
        ("patch", "namespaces"),
        ("patch", "deployments", "apps"),
        ("create", "events"),
        ("get", "events", "events.k8s.io"),
    ]
    try:
        wait_for(lambda: all(may(*request) for request in allowed), "the rights to count")
        assert [request for request in denied if may(*request)] == []
    finally:
        rbac.delete_cluster_role_binding(binding["metadata"]["name"])
        rbac.delete_cluster_role(role["metadata"]["name"])
        for each in local:
            delete = {"Role": rbac.delete_namespaced_role, "RoleBinding": rbac.delete_namespaced_role_binding}
            delete[each["kind"]](each["metadata"]["name"], each["metadata"]["namespace"])
    wait_for(lambda: not any(may(*request) for request in allowed), "the rights to go")


def test_the_kubelets_pods_are_mounted_only_where_trainings_are_read(helm: Helm) -> None:
    for files, expected in (("none", []), ("read", ["/var/lib/kubelet/pods"])):
        pod = find(helm.objects({"settings": {"training": {"files": files}}}), "DaemonSet")["spec"]["template"]["spec"]
        mounts = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "pods"]
        assert [each["mountPath"] for each in mounts] == expected
        # Without HostToContainer, the agent would keep volumes of ended pods busy.
        assert all(each["readOnly"] and each["mountPropagation"] == "HostToContainer" for each in mounts)
        assert [each["hostPath"]["path"] for each in pod["volumes"] if each["name"] == "pods"] == expected


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
    assert len(pods) == 4
    for pod in pods:
        (container,) = pod["containers"]
        is_agent = "agent" in container["image"]
        command = [sys.executable, "-m", "gpu_exporter", *([] if is_agent else ["reconcile"]), "--help"]
        known = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
        for flag in container["args"]:
            name = flag.split("=")[0].removeprefix("--").removeprefix("no-")
            assert re.search(rf"--(\[no-\])?{re.escape(name)}\b", known), name
