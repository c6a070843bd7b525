"""Values that sites combine: each has its effect, none makes an object that the API server or another tool refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_exporter.common.durations import format_duration, parse_duration
from tests.component.test_chart import VARIANTS
from tests.testbed.chart import CHART, Helm, find

pytestmark = pytest.mark.kubernetes
OPENSHIFT = yaml.safe_load((CHART / "presets" / "openshift.yaml").read_text("utf-8"))
LABELS = {
    "commonLabels": {"team": "a", "release": "common", "grafana_dashboard": "0"},
    "commonAnnotations": {"note": "common"},
    "agent": {"podLabels": {"team": "b"}, "podAnnotations": {"checksum/config": "mine"}},
    "reconciler": {"apply": True, "podLabels": {"team": "b"}, "podAnnotations": {"sidecar.istio.io/inject": "false"}},
    "podMonitor": {"enabled": True, "labels": {"release": "kps"}, "annotations": {"note": "own"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "kps"}},
    "dashboard": {"enabled": True},
    "tests": {"enabled": True},
    "digest": {"enabled": True},
}


class UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, as kustomize does. PyYAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"line {node.start_mark.line + 1}: {sorted(keys)}"
        return super().construct_mapping(node, deep)


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path)


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By component, metadata and spec of each pod that the release makes."""
    found = {}
    for each in objects:
        if each["kind"] in ("DaemonSet", "Deployment", "Job"):
            found[each["metadata"]["labels"]["app.kubernetes.io/component"]] = each["spec"]["template"]
        elif each["kind"] == "CronJob":
            found[each["metadata"]["labels"]["app.kubernetes.io/component"]] = each["spec"]["jobTemplate"]["spec"][
                "template"
            ]
        elif each["kind"] == "Pod":
            found[each["metadata"]["labels"]["app.kubernetes.io/component"]] = each
    return found


@pytest.mark.parametrize("values", [*VARIANTS.values(), LABELS], ids=[*VARIANTS, "labels"])
def test_no_object_has_a_key_twice(helm: Helm, values: dict[str, Any]) -> None:
    found = [each for each in yaml.load_all(helm.template(values).stdout, UniqueKeys) if each]
    assert found
    for component, pod in pods_of(found).items():
        for container in pod["spec"]["containers"]:
            names = [each["name"] for each in container.get("env", ())]
            assert len(names) == len(set(names)), component


def test_the_nearest_label_counts(helm: Helm) -> None:
    objects = helm.objects(LABELS)
    assert {pod["metadata"]["labels"]["team"] for pod in pods_of(objects).values()} == {"b"}
    assert find(objects, "DaemonSet")["metadata"]["labels"]["team"] == "a"
    assert find(objects, "PodMonitor", "-agent")["metadata"]["labels"]["release"] == "kps"
    assert find(objects, "PodMonitor", "-agent")["metadata"]["annotations"]["note"] == "own"
    maps = [each for each in objects if each["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert len(maps) == 4


def test_every_pod_of_the_reconcilers_image_has_its_annotations_and_pull_secrets(helm: Helm) -> None:
    volume = {"name": "ca", "configMap": {"name": "ca"}}
    more = {"extraVolumes": [volume], "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
    values = {**LABELS, "reconciler": {**LABELS["reconciler"], **more}, "imagePullSecrets": [{"name": "r"}]}
    pods = pods_of(helm.objects(values))
    for component in ("reconciler", "cleanup", "test", "digest"):
        pod = pods[component]
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false", "its proxy would never end the job"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "r"}]
    for component in ("reconciler", "test", "digest"):
        assert volume in pods[component]["spec"]["volumes"]
        assert {"name": "ca", "mountPath": "/ca"} in pods[component]["spec"]["containers"][0]["volumeMounts"]
    assert "volumes" not in pods["cleanup"]["spec"], "a Secret of the release is gone when the job begins"


def test_the_test_pod_reads_prometheus_with_the_reconcilers_account(helm: Helm) -> None:
    objects = helm.objects({**OPENSHIFT, "tests": {"enabled": True}})
    pods = pods_of(objects)
    assert "/var/run/secrets/kubernetes.io/serviceaccount/token" in str(pods["test"]["spec"]["containers"][0]["args"])
    for pod in (pods["test"], pods["reconciler"]):
        assert pod["spec"]["automountServiceAccountToken"] is True
    assert pods["test"]["spec"]["serviceAccountName"] == pods["reconciler"]["spec"]["serviceAccountName"]
    plain = pods_of(helm.objects({"tests": {"enabled": True}}))["test"]["spec"]
    assert plain["automountServiceAccountToken"] is False, "Prometheus does not ask for it"


def test_the_digest_reads_prometheus_as_the_reconciler_and_needs_no_right_of_the_cluster(helm: Helm) -> None:
    pods = pods_of(helm.objects({**OPENSHIFT, "digest": {"enabled": True}}))
    digest, reconciler = pods["digest"]["spec"], pods["reconciler"]["spec"]
    assert (digest["serviceAccountName"], digest["automountServiceAccountToken"]) == (
        reconciler["serviceAccountName"],
        True,
    )
    sources = [[flag for flag in pod["containers"][0]["args"] if "--source." in flag] for pod in (digest, reconciler)]
    assert sources[0] == sources[1] and len(sources[0]) > 2
    plain = pods_of(helm.objects({"digest": {"enabled": True}}))["digest"]["spec"]
    assert plain["automountServiceAccountToken"] is False, "Prometheus does not ask for it"
    assert not [flag for flag in plain["containers"][0]["args"] if "--mail." in flag], "the log of the pod has it"


def test_a_digest_without_agent_and_reconciler_has_its_settings_and_no_account_that_is_missing(helm: Helm) -> None:
    off = {"agent": {"enabled": False}, "reconciler": {"enabled": False}}
    objects = helm.objects({**off, "digest": {"enabled": True, "schedule": "@weekly"}})
    assert sorted(each["kind"] for each in objects) == ["ConfigMap", "CronJob"]
    assert "serviceAccountName" not in pods_of(objects)["digest"]["spec"]
    assert find(objects, "CronJob")["spec"]["schedule"] == "@weekly"
    assert find(objects, "ConfigMap")["metadata"]["name"] in str(pods_of(objects)["digest"]["spec"]["volumes"])
    assert "digest" not in pods_of(helm.objects({}))


@pytest.mark.parametrize(
    ("reconciler", "made"),
    [({}, ["post-delete"]), ({"serviceAccount": {"create": False, "name": "sites"}}, [])],
    ids=["the chart's account", "the site's account"],
)
def test_the_cleanup_job_has_an_account_though_helm_has_deleted_the_release(
    helm: Helm, reconciler: dict[str, Any], made: list[str]
) -> None:
    """Without rights of the chart: the site has bound its own to the name of the reconciler's account."""
    objects = helm.objects({"rbac": {"create": False}, "reconciler": {"apply": True, **reconciler}})
    name = pods_of(objects)["cleanup"]["spec"]["serviceAccountName"]
    hooks = [
        each["metadata"]["annotations"]["helm.sh/hook"]
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("ServiceAccount", name)
        and "helm.sh/hook" in each["metadata"].get("annotations", {})
    ]
    assert name == pods_of(objects)["reconciler"]["spec"]["serviceAccountName"]
    assert hooks == made


def test_a_sites_probe_replaces_the_charts(helm: Helm) -> None:
    """A port that wants certificates of its clients cannot be probed by the kubelet."""
    command = {"exec": {"command": ["gpu-exporter", "--version"]}}
    probes = {"livenessProbe": {**command, "httpGet": None}, "readinessProbe": command}
    for part in ("agent", "reconciler"):
        pod = pods_of(helm.objects({part: probes}))[part]
        for name in probes:
            probe = pod["spec"]["containers"][0][name]
            assert probe["exec"] == command["exec"]
            assert "httpGet" not in probe and probe["periodSeconds"]


def test_objects_of_the_site_are_taken_as_they_are_and_texts_may_contain_templates(helm: Helm) -> None:
    alert = "{{ $labels.pod }} is down"
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": alert}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-b'}"
    objects = helm.objects({"extraManifests": [manifest, text]})
    assert manifest in objects
    assert find(objects, "ConfigMap", "gpu-b")


def notes(helm: Helm, *on: str, **values: Any) -> str:
    """NOTES.txt with these parts switched on. Helm shows it only with a cluster, so an object carries it."""
    text = (CHART / "templates" / "NOTES.txt").read_text("utf-8")
    carried = '{{ define "notes" }}' + text + "{{ end }}apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\n"
    carried += 'data: {notes: {{ include "notes" . | quote }}}'
    parts = ("agent", "reconciler", "podMonitor", "prometheusRule")
    switched = {part: {"enabled": part in on, **values.get(part, {})} for part in parts}
    shown: str = find(helm.objects({**switched, "extraManifests": [carried]}), "ConfigMap", "notes")["data"]["notes"]
    return shown


@pytest.mark.parametrize(
    ("on", "needs"),
    [
        ((), ""),
        (("podMonitor",), ""),
        (("reconciler",), "Its reconciler needs agents"),
        (("prometheusRule",), "Its rules need agents"),
        (("prometheusRule", "reconciler"), "Its rules and its reconciler need agents"),
    ],
)
def test_the_notes_of_a_release_without_agents_name_only_its_parts(helm: Helm, on: tuple[str, ...], needs: str) -> None:
    shown = notes(helm, *on).splitlines()[0]
    assert shown == (
        "This release runs no agent. " + needs + " of another installation, e.g. on the hosts."
        if needs
        else "This release runs no agent."
    )


@pytest.mark.parametrize(
    ("on", "lost", "named"),
    [
        (("podMonitor",), "", ""),
        (("agent", "podMonitor"), "scrapes nothing", "podMonitor.labels"),
        (("reconciler", "podMonitor"), "scrapes nothing", "podMonitor.labels"),
        (("prometheusRule",), "has no alerts", "prometheusRule.labels"),
        (("podMonitor", "prometheusRule"), "has no alerts", "prometheusRule.labels"),
        (("agent", "podMonitor", "prometheusRule"), "scrapes nothing and has no alerts", "podMonitor.labels, prometheusRule.labels"),
    ],
)  # fmt: skip
def test_the_notes_warn_of_missing_labels_only_for_objects_of_the_release(
    helm: Helm, on: tuple[str, ...], lost: str, named: str
) -> None:
    shown = notes(helm, *on)
    assert ("No label for the Prometheus operator" in shown) == bool(lost)
    if lost:
        assert f"({named})." in shown and f"otherwise it {lost}. See" in shown


def test_a_group_of_controllers_can_be_left_out(helm: Helm) -> None:
    objects = helm.objects({"reconciler": {"ownerResources": {"ray.io": []}}})
    rules = find(objects, "ClusterRole", "-reconciler")["rules"]
    assert all(rule["resources"] for rule in rules)
    assert "ray.io" not in str(rules) and "kubeflow.org" in str(rules)


def test_the_constraints_of_openshift_admit_what_the_values_ask_for(helm: Helm) -> None:
    agent = {
        "extraVolumes": [{"name": "ca", "projected": {"sources": []}}],
        "securityContext": {"readOnlyRootFilesystem": False, "capabilities": {"add": ["SYS_ADMIN"]}},
    }
    for values, volumes, read_only, added in (
        (OPENSHIFT, ["configMap", "emptyDir", "hostPath", "secret"], True, []),
        (
            {**OPENSHIFT, "agent": {**OPENSHIFT["agent"], **agent}},
            ["configMap", "emptyDir", "hostPath", "projected", "secret"],
            False,
            ["SYS_ADMIN"],
        ),
    ):
        found = find(helm.objects(values), "SecurityContextConstraints")
        assert found["volumes"] == volumes
        assert (found["readOnlyRootFilesystem"], found["allowedCapabilities"]) == (read_only, added)


def test_openshifts_own_prometheus_finds_the_pods(helm: Helm) -> None:
    """Prometheus for user workloads replaces the label namespace, so the series of a pod would be of the agent."""
    objects = helm.objects(OPENSHIFT)
    binding = find(objects, "RoleBinding", "-prometheus")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "prometheus-k8s", "namespace": "openshift-monitoring"}
    ]
    assert "pods" in find(objects, "Role", "-prometheus")["rules"][0]["resources"]


def test_durations_reach_rules_and_monitors_as_the_programs_write_them(helm: Helm) -> None:
    """PromQL knows neither 1.5h nor 30m1h."""
    alerts = {"window": "1.5h", "wait": "30m1h", "keep": "1m30s", "low_over": "1w2d", "source_window": "7d"}
    values = {
        "settings": {"alerts": alerts},
        "prometheusRule": {"enabled": True, "otherExporter": "source-dcgm"},
        "podMonitor": {"enabled": True, "interval": "1m30s", "scrapeTimeout": "30s"},
    }
    objects = helm.objects(values)
    monitor = find(objects, "PodMonitor", "-agent")["spec"]["podMetricsEndpoints"][0]
    assert (monitor["interval"], monitor["scrapeTimeout"]) == ("90s", "30s")
    text = str([each["spec"] for each in objects if each["kind"] == "PrometheusRule"])
    assert not [each for each in alerts.values() if each in text]
    written = {name: format_duration(parse_duration(each)) for name, each in alerts.items()}
    assert written == {"window": "90m", "wait": "90m", "keep": "90s", "low_over": "9d", "source_window": "1w"}
    assert "[90m]" in text and "'for': '90m'" in text and "'keep_firing_for': '90s'" in text
    assert "[9d]" in text and "> 777600 + 5400" in text and "[1w]" in text


def test_a_namespace_of_digits_stays_a_text(helm: Helm) -> None:
    objects = helm.objects({"namespaceOverride": "1234", "nameOverride": "99", "podMonitor": {"enabled": True}})
    assert {each["metadata"].get("namespace", "1234") for each in objects} == {"1234"}
    assert find(objects, "PodMonitor", "-agent")["spec"]["namespaceSelector"] == {"matchNames": ["1234"]}
    assert find(objects, "DaemonSet")["metadata"]["labels"]["app.kubernetes.io/name"] == "99"


@pytest.mark.parametrize(
    "values",
    [
        OPENSHIFT,
        {"agent": {"resources": {"limits": None}}},
        {"agent": {"resources": None}, "reconciler": {"resources": None}},
        {"reconciler": {"podSecurityContext": {"runAsUser": None}}},
    ],
    ids=["openshift", "a part", "a whole", "a uid"],
)
def test_what_was_set_to_null_stays_away_in_an_upgrade_with_reused_values(helm: Helm, values: dict[str, Any]) -> None:
    """Those of a chart with another valuesVersion, whose gaps the defaults fill."""
    assert helm.template(values | {"valuesVersion": 0}).stdout == helm.template(values).stdout
