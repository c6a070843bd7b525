"""From a simulated node to mails, on a real Prometheus and Alertmanager: one mail per incident, even if a server restarts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from email.message import EmailMessage
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.servers import Mailbox, Prometheus, Webhook, require, start_alertmanager

ROOT = Path(__file__).resolve().parents[2]
IDLE_FOR_S = 15
GRAFANA = "https://grafana.example.org"
# A restart takes some seconds, a sixth of this short window, so the usual minimum coverage would be too high.
WINDOW = ("interval=1s", "owners_interval=1s", "window=30s", "coverage_min=0.5", "wait=3s", "keep=25s")
SHORT = (f"idle_for={IDLE_FOR_S}s", *WINDOW, f"grafana={GRAFANA}")
ADA, OPERATIONS = "a.lovelace@example.org", "gpu-operations@example.org"

pytestmark = pytest.mark.servers


def build_rules(directory: Path, *more: str) -> list[Path]:
    build = [sys.executable, "-m", "tools.rules", "--output", str(directory)]
    subprocess.run([*build, *(f"--set={each}" for each in (*SHORT, *more))], cwd=ROOT, check=True, capture_output=True)
    return sorted(directory.glob("*.yaml"))


def write_addresses(directory: Path) -> None:
    directory.mkdir()
    mapping = {"users": {"ada": ADA}, "domain": "users.example.org", "default": "gpu-admins@example.org"}
    (directory / "owners.yaml").write_text(yaml.safe_dump(mapping), encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "alerts" / "owners.py"), str(directory / "owners.yaml")], check=True)


def test_each_incident_sends_one_mail_even_over_restarts(processes: Processes, tmp_path: Path) -> None:
    load = {"kind": "constant", "value": 0.9}
    gpus: list[dict[str, Any]] = [
        *({"model": "H100"} for _ in range(4)),
        {"model": "H100", "load": load, "throttle": [{"reason": "hw_thermal", "share": 1.0}]},
    ]
    holders = [
        *({"gpu": gpu, "kind": "job", "name": str(40 + gpu), "user": "ada"} for gpu in range(3)),
        {"gpu": 3, "kind": "job", "name": "43", "user": "bob;evil", "account": "phys"},
        {"gpu": 4, "kind": "job", "name": "44", "user": "eve"},
    ]
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump({"gpus": gpus, "holders": holders}), encoding="utf-8")
    # Without Slurm, because other tests may run a Slurm cluster here. The scenario has the holders.
    flags = ("--no-attribution.slurm", f"--devices.scenario={scenario}", f"--state.directory={tmp_path / 'state'}")
    # The exporter is away until a mail has arrived: on a busy machine that takes longer than the alerts are kept elsewhere.
    rules = build_rules(tmp_path / "rules", "keep=60s")
    write_addresses(tmp_path / "alertmanager")
    mailbox = Mailbox()
    (tmp_path / "free.yaml").write_text("gpus: [{model: H100}]\n", encoding="utf-8")
    _, healthy = processes.start_exporter("--no-attribution.slurm", f"--devices.scenario={tmp_path / 'free.yaml'}")
    ports = [free_port() for _ in range(3)]

    def start_prometheus() -> Prometheus:
        return Prometheus(
            processes,
            tmp_path / "prometheus",
            {"n1": f"127.0.0.1:{ports[0]}", "n2": healthy.removeprefix("http://")},
            rules=rules,
            alertmanager=f"127.0.0.1:{ports[2]}",
            port=ports[1],
            # As with `for: 10m` and the default of 10m, Prometheus restores the state of a pending or firing alert.
            flags=["--rules.alert.for-grace-period=1s"],
        )

    alertmanager, _ = start_alertmanager(processes, tmp_path / "alertmanager", mail_port=mailbox.port, port=ports[2])
    exporter, _ = processes.start_exporter(*flags, port=ports[0])
    prometheus = start_prometheus()
    wait_for(lambda: mailbox.to(ADA) or None, "the owner's mail")
    wait_for(lambda: mailbox.to(OPERATIONS, "GpuThrottled") or None, "the mail about the throttled GPU")

    exporter.stop(9)
    exporter, _ = processes.start_exporter(*flags, port=ports[0])
    prometheus.running.stop()
    prometheus = start_prometheus()
    alertmanager.stop()
    start_alertmanager(processes, tmp_path / "alertmanager", mail_port=mailbox.port, port=ports[2])
    restarted = time.time()
    query = 'count(ALERTS{alertname="GpuHolderIdle",alertstate="firing"})'
    wait_for(lambda: prometheus.query(query) == [({}, 4.0)] or None, "the alerts to fire on")
    wait_for(lambda: time.time() - restarted > 20 or None, "a second mail to have had its time", each_s=0.5)

    (mail,) = mailbox.to(ADA)
    assert mail["Subject"] == "GPUs of 3 jobs are not used"
    assert isinstance(mail, EmailMessage)
    for kind in ("plain", "html"):
        part = mail.get_body((kind,))
        assert part is not None
        text = part.get_content()
        for job in ("40", "41", "42"):
            since = rf"Job {job} holds a GPU and has not used it since 20\d\d-\d\d-\d\d \d\d:\d\d UTC\. Stop it"
            assert re.search(since, text), text
            assert re.search(rf"GPU {int(job) - 40} of \S+\. Idle GPU-hours so far: \d+\.\d\.", text), text
            assert f"scancel {job}" in text, text
        assert "Job 43" not in text
        links = [f"{GRAFANA}/d/gpu-exporter-holder?orgId=1&var-namespace=&var-pod=&var-jobid={job}" for job in (40, 42)]
        assert all(link in text.replace("&amp;", "&") for link in links), text
    (other,) = mailbox.to("bobevil@users.example.org")
    assert other["Subject"] == "GPUs of job 43 are not used"
    (throttled,) = mailbox.to(OPERATIONS, "GpuThrottled")
    assert throttled["Subject"] == "1 x GpuThrottled on n1"
    assert {mail["To"] for mail in mailbox.mails} == {ADA, "bobevil@users.example.org", OPERATIONS}
    assert mailbox.to(OPERATIONS) == [throttled], [mail["Subject"] for mail in mailbox.mails]

    # The node's exporter ends: there is one more mail, but no mail about its throttled GPU. Then the incident is resolved.
    exporter.stop()
    wait_for(lambda: mailbox.to(OPERATIONS, "GpuExporterDown") or None, "the mail about the exporter")
    processes.start_exporter(*flags, port=ports[0])
    wait_for(
        lambda: mailbox.to(OPERATIONS, "resolved: GpuExporterDown") or None,
        "the mail that the exporter answers again",
    )
    assert len(mailbox.to(OPERATIONS, "1 x GpuExporterDown")) == 1
    assert len(mailbox.to(OPERATIONS, "1 x GpuThrottled")) == 1
    assert len(mailbox.to(ADA)) == 1
    mailbox.close()


CAUSES = {  # the annotation of the alert, the sentence, and what to change
    "101": (
        "cpu_oversubscribed (high confidence) cpus=4 runnable_threads=96 threads_to_set=4",
        "96 threads are runnable on 4 CPUs. (cpu_oversubscribed, high confidence)",
        "Set OMP_NUM_THREADS=4.",
    ),
    "102": (
        "cpu_quota (medium confidence) cpus=8 throttled_ratio=40%",
        "Its quota of 8 CPUs ran out in 40% of the periods. (cpu_quota, medium confidence)",
        "Ask for more CPUs (Kubernetes: limits.cpu; Slurm: --cpus-per-task).",
    ),
    "103": (
        "too_few_workers (high confidence) free_cpus=6.6 workers_to_try=5",
        "Few processes load its data, and 6.6 CPUs are free. (too_few_workers, high confidence)",
        "Set num_workers of the DataLoader to 5.",
    ),
    "104": (
        "lost_rank (high confidence) gpus=4 run_seconds=25m0s waiting_gpus=3",
        "A rank cannot continue; 3 of the job's 4 GPUs on the node have waited for 25m0s. (lost_rank, high confidence)",
        "Continue stopped processes (kill -CONT); if none is stopped, save log and stacks, and restart.",
    ),
    "105": (
        "far_numa (medium confidence)",
        "Its processes may run only on CPUs that are not near this GPU. (far_numa, medium confidence)",
        "Bind the job to CPUs near its GPUs (Slurm: --gres-flags=enforce-binding).",
    ),
}


def test_a_mail_has_the_cause_what_to_change_and_commands_that_its_reader_can_run(
    processes: Processes, tmp_path: Path
) -> None:
    mailbox = Mailbox()
    _, address = start_alertmanager(processes, tmp_path / "alertmanager", mail_port=mailbox.port)
    labels = {"alertname": "GpuHolderIdle", "audience": "owner", "severity": "warning"}
    alerts: list[dict[str, Any]] = [
        {
            "labels": {**labels, "scheduler": "slurm", "job_id": job, "user": f"user{job}"},
            "annotations": {"description": f"Job {job} holds a GPU.", "cause": cause, "gpus": "GPU 4 of gpu-17."},
        }
        for job, (cause, _, _) in CAUSES.items()
    ]
    pod = {**labels, "scheduler": "kubernetes", "namespace": "ml", "pod": "train-0"}
    owned = {**pod, "namespace": "web", "pod": "chat-5d9", "workload": "chat", "workload_type": "deployment"}
    kept = {"description": "Pod ml/train-0 holds a GPU.", "stage": "at=2026-11-29 14:20 UTC; candidate "}
    alerts += [{"labels": pod, "annotations": kept}, {"labels": owned, "annotations": {"description": "A pod."}}]
    part = {
        **labels,
        "scheduler": "slurm",
        "user": "het",
        "job_id": "3012",
        "het_job_id": "3011",
        "het_job_offset": "1",
    }
    alerts.append({"labels": part, "annotations": {"description": "A part.", "stage": "candidate "}})
    alerts[0]["annotations"]["stage"] = "underused "
    call(f"http://{address}/api/v2/alerts", json.dumps(alerts).encode())
    wait_for(lambda: len(mailbox.mails) >= len(alerts) or None, "all mails")
    texts: dict[str, list[str]] = {}
    for mail in mailbox.mails:
        assert isinstance(mail, EmailMessage)
        parts = [mail.get_body((kind,)) for kind in ("plain", "html")]
        texts[mail["Subject"]] = [unescape(part.get_content()) for part in parts if part is not None]
    for job, (_, why, change) in CAUSES.items():
        for text in texts[f"GPUs of job {job} are not used"]:
            plain = re.sub(r"<[^>]*>", "", text)
            assert f"Why: {why}" in plain
            assert f"What to change: {change}" in plain
            assert f"scancel {job}" in plain
            # Only where a reconciler runs can a wish keep the GPUs.
            assert (f"scontrol update JobId={job} Comment=gpu-keep=4h" in plain) == (job == "101")
            assert ("replaces the Comment of the job" in plain) == (job == "101")
            assert "kubectl" not in plain and "amtool" not in plain
    for text in texts["GPUs of pod ml/train-0 are not used"]:
        assert "kubectl -n ml delete pod train-0" in text
        assert "kubectl -n ml annotate --overwrite pod train-0 gpu-exporter.io/exempt-until=$(date" in text
        assert "Why:" not in text and "scancel" not in text and "scontrol" not in text
        assert "and may take them back: these from 2026-11-29 14:20 UTC, if they stay idle. To keep" in text
    for text in texts["GPUs of job 3011+1 are not used"]:  # its other parts may work
        assert "scancel 3011+1" in text and "scontrol update JobId=3011+1 Comment" in text
        assert "and may take them back. To keep" in text  # when is not known
    for text in texts["GPUs of pod web/chat-5d9 are not used"]:
        assert "(its deployment chat starts it again: delete or scale that)" in text
        assert "annotate" not in text
    mailbox.close()


def test_the_commented_slack_and_webhook_examples_work(processes: Processes, tmp_path: Path) -> None:
    slack, webhook = Webhook(), Webhook()
    (tmp_path / "slack-url").write_text(slack.url, encoding="utf-8")
    text = (ROOT / "alerts" / "alertmanager" / "alertmanager.yaml").read_text("utf-8")
    before, found, after = text.partition("    # slack_configs:")
    comments, end, rest = after.partition("  - name: gpu-operations")
    assert found
    assert end
    text = before + re.sub("(?m)^    # ", "    ", found + comments) + end + rest
    text = text.replace("/etc/alertmanager/slack-url", str(tmp_path / "slack-url"))
    text = text.replace("http://127.0.0.1:9095/gpu-owners", webhook.url)
    _, address = start_alertmanager(processes, tmp_path / "alertmanager", text=text)
    labels = {"alertname": "GpuHolderIdle", "audience": "owner", "severity": "warning"}
    holder = {"scheduler": "kubernetes", "namespace": "ml", "pod": "train-0"}
    alert = {"labels": {**labels, **holder}, "annotations": {"description": "Pod ml/train-0 holds a GPU."}}
    call(f"http://{address}/api/v2/alerts", json.dumps([alert]).encode())
    wait_for(lambda: bool(slack.received and webhook.received), "both notifications")
    (message,) = slack.received
    assert message["channel"] == "#gpu-ml"
    (attachment,) = message["attachments"]
    assert attachment["title"] == "GPUs of pod ml/train-0 are not used"
    assert "Pod ml/train-0 holds a GPU." in attachment["text"]
    (notification,) = webhook.received
    assert notification["commonLabels"] == {**labels, **holder}
    slack.close()
    webhook.close()


@pytest.mark.parametrize(
    ("source", "target", "is_muted"),
    [
        ({"alertname": "GpuDriverDown", "node": "n1"}, {"alertname": "GpuXid", "node": "n1", "uuid": "G"}, True),
        ({"alertname": "GpuExporterDown", "node": "n1"}, {"alertname": "GpuLost", "node": "n1", "uuid": "G"}, True),
        ({"alertname": "GpuExporterBlind", "node": "n1"}, {"alertname": "GpuXid", "node": "n2", "uuid": "G"}, False),
        # A label that both lack must not count as equal.
        ({"alertname": "GpuDriverDown"}, {"alertname": "GpuXid", "uuid": "G"}, False),
        ({"alertname": "GpuDriverDown", "node": "n1"}, {"alertname": "GpuNodeClockWrong", "node": "n1"}, False),
        (
            {"alertname": "GpuLost", "node": "n1", "uuid": "G"},
            {"alertname": "GpuThrottled", "node": "n1", "uuid": "G"},
            True,
        ),
        (
            {"alertname": "GpuLost", "node": "n1", "uuid": "G"},
            {"alertname": "GpuThrottled", "node": "n1", "uuid": "H"},
            False,
        ),
        ({"alertname": "GpuLost", "node": "n1"}, {"alertname": "GpuThrottled", "node": "n1"}, False),
        (
            {"alertname": "GpuLost", "node": "n1", "uuid": "G"},
            {"alertname": "GpuXid", "node": "n1", "uuid": "G"},
            False,
        ),
        ({"alertname": "GpuFleetDegraded"}, {"alertname": "GpuLost", "node": "n1", "uuid": "G"}, True),
        (
            {"alertname": "GpuFleetDegraded", "cluster": "a"},
            {"alertname": "GpuLost", "cluster": "b", "uuid": "G"},
            False,
        ),
        ({"alertname": "GpuThrottledMany"}, {"alertname": "GpuThrottled", "node": "n1", "uuid": "G"}, True),
        ({"alertname": "GpuMonitoringAbsent"}, {"alertname": "GpuExporterDown", "node": "n1"}, True),
        ({"alertname": "GpuDriverDown", "node": "n1"}, {"alertname": "GpuHolderIdle", "audience": "owner"}, False),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_an_alert_mutes_exactly_the_alerts_that_it_explains(
    inhibiting: str, source: dict[str, str], target: dict[str, str], is_muted: bool
) -> None:
    """Uses a real Alertmanager. Each pair has a separate cluster, unless the case is about this label."""
    number = f"{abs(hash((tuple(source.items()), tuple(target.items()))))}"
    alerts = [{"labels": {"audience": "operations", **labels, "case": number}} for labels in (source, target)]
    body = json.dumps(alerts).encode()
    call(f"http://{inhibiting}/api/v2/alerts", body)
    query = f"http://{inhibiting}/api/v2/alerts?filter=case%3D%22{number}%22"

    def states() -> dict[str, list[str]] | None:
        found = json.loads(call(query))
        by_name = {each["labels"]["alertname"]: each["status"]["inhibitedBy"] for each in found}
        return by_name if len(by_name) == 2 else None

    def as_expected() -> bool | None:
        found = states()
        return (found is not None and bool(found[target["alertname"]]) == is_muted) or None

    wait_for(as_expected, f"inhibited: {is_muted}")
    found = states()
    assert found is not None
    assert found[source["alertname"]] == []
    ended = [{**alert, "endsAt": "2001-01-01T00:00:00Z", "startsAt": "2000-01-01T00:00:00Z"} for alert in alerts]
    call(
        f"http://{inhibiting}/api/v2/alerts", json.dumps(ended).encode()
    )  # so that no case mutes the alerts of the next case


@pytest.fixture(scope="module")
def inhibiting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The host:port of an Alertmanager with the shipped configuration, which sends no mail."""
    require("prometheus-alertmanager")
    directory = tmp_path_factory.mktemp("inhibiting")
    with Processes(directory) as processes:
        yield start_alertmanager(processes, directory / "alertmanager")[1]


def call(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5.0) as answer:
        text: str = answer.read().decode()
        return text
