"""End to end: the real reconciler with a real Prometheus, Alertmanager and API server suspends a Job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reconciler.actions.record import KEY, Record
from gpu_exporter.reconciler.decision.outcomes import RIGHT, RUNS, Account
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import RECORD_SUFFIX, LeaseTexts
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from tests.component.test_proofs import DAY_S, alert, backfill, line, post
from tests.component.test_surroundings import Site
from tests.testbed.control_plane import ControlPlane
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, fetch, free_port, wait_for
from tests.testbed.proven import Tally, Texts
from tests.testbed.servers import Prometheus, start_alertmanager

pytestmark = [pytest.mark.kubernetes, pytest.mark.servers]
IDLE_S, STEP_S, LASTS_S = 9000, 15, 300
LEASE = "reconciler"
SETTINGS = """
policy: {candidate_after: 30m, underused_after: 60m}
actions: {mode: act, kinds: suspend, warned_for: 10s, shadow_for: 2d, shadow_decisions: 10}
"""


def of_pod(namespace: str, pod: str, uid: str, uuid: str, now: int) -> Iterator[str]:
    """An exporter's series of a pod whose one GPU has been idle since the pod began."""
    job = {"job": "gpu-exporter", "instance": "n1"}
    unit = {**job, "gpu": "0", "uuid": uuid, "scheduler": "kubernetes", "namespace": namespace, "pod": pod}
    for second in range(0, IDLE_S + LASTS_S, STEP_S):
        at = now - IDLE_S + second
        yield line("gpu_allocation_held_seconds_total", second, at, **unit)
        yield line("gpu_allocation_observed_seconds_total", second, at, **unit)
        if second < IDLE_S - 300:
            continue
        yield line("gpu_allocation_info", 1, at, **unit, pod_uid=uid, resource="nvidia.com/gpu")
        yield line("gpu_allocation_start_timestamp_seconds", now - IDLE_S, at, **unit)
        yield line("gpu_allocation_idle_run_seconds", second, at, **unit)
        yield line("gpu_allocation_idle_run_witnesses", 4, at, **unit)
        yield line("gpu_allocation_holder_units", 1, at, **unit)
        yield line("gpu_allocation_host_activity_ratio", 0.01, at, **unit)
        yield line("allocation:gpu_pool:info", 1, at, **unit, pool="nvidia_com_gpu")


def of_site(now: int) -> Iterator[str]:
    """Series of the exporter itself, and of the demand for GPUs."""
    exporter = {"job": "gpu-exporter", "instance": "n1"}
    for second in range(-600, LASTS_S, STEP_S):
        yield line("gpu_exporter_build_info", 1, now + second, **exporter)
        yield line("gpu_exporter_last_sample_timestamp_seconds", now + second, now + second, **exporter)
        yield line("gpu_exporter_sample_interval_seconds", 1, now + second, **exporter)
    for second in range(-1800, LASTS_S, STEP_S):
        yield line("pool:gpu_pending_gpus:capped", 4, now + second, pool="nvidia_com_gpu")


def record_of_two_days(now: float) -> str:
    """The record of an earlier process: twelve decisions on each of four tenants, all of them right."""
    clock, texts = ManualClock(wall=now - 2.1 * DAY_S), Texts()
    record = Record(texts, Tally(), clock, 2.0 * DAY_S)
    while clock.wall() < now - 60.0:
        record.note([], clock.wall(), lambda name, incarnation: RUNS)
        clock.advance(60.0)
    for tenant in ("a", "b", "c", "d"):
        for _ in range(12):
            record.count_decision(Account("policy", "batch", tenant))
            record.count_outcome(Account("policy", "batch", tenant), RIGHT)
    record.note([], clock.wall(), lambda name, incarnation: RUNS)
    return texts.kept[KEY]


class Stage(NamedTuple):
    site: Site
    running: Running
    url: str
    prometheus: str
    alertmanager: str
    audit: Path

    def read(self, family: str, **labels: str) -> float:
        text = fetch(f"{self.url}/metrics") or ""
        samples = (sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
        return sum(each.value for each in samples if each.name == family and labels.items() <= each.labels.items())


@pytest.fixture
def stage(plane: ControlPlane, tmp_path: Path) -> Iterator[Stage]:
    site = Site(plane, "whole-way")
    pods = site.job("train", 2)
    now = int(time.time())
    uids = [site.source.pods[pod][0] for pod in pods]
    rows = [row for at, pod in enumerate(pods) for row in of_pod(site.namespace, pod, uids[at], f"GPU-{at}", now)]
    (tmp_path / "prometheus").mkdir()
    backfill(tmp_path / "prometheus", iter([*rows, *of_site(now)]))
    texts = LeaseTexts(Api(ControlPlane.connect(plane.admin)), site.namespace, f"{LEASE}{RECORD_SUFFIX}")
    texts.read_text(KEY)
    texts.write_text(KEY, record_of_two_days(now))
    (tmp_path / "config.yaml").write_text(SETTINGS, encoding="utf-8")
    audit, port = tmp_path / "audit.jsonl", free_port()
    with Processes(tmp_path) as processes:
        prometheus = Prometheus(processes, tmp_path / "prometheus", {}, flags=["--web.enable-admin-api"])
        _, alertmanager = start_alertmanager(processes, tmp_path / "alertmanager")
        flags = [
            f"--config.file={tmp_path / 'config.yaml'}",
            f"--source.prometheus={prometheus.url}",
            f"--alertmanager.url=http://{alertmanager}",
            f"--kubernetes.kubeconfig={plane.admin}",
            f"--kubernetes.lease={site.namespace}/{LEASE}",
            f"--audit.file={audit}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        running = processes.start([*GPU_EXPORTER, "reconcile", "--apply", "--no-slurm", "--interval=2s", *flags])
        yield Stage(site, running, f"http://127.0.0.1:{port}", prometheus.url, f"http://{alertmanager}", audit)
    client.BatchV1Api(plane.api).delete_namespaced_job("train", site.namespace, propagation_policy="Background")
    plane.core.delete_collection_namespaced_pod(site.namespace, grace_period_seconds=0)


def test_a_job_is_suspended_only_after_its_owner_has_been_warned(stage: Stage) -> None:
    site = stage.site
    pods = sorted(site.source.pods)
    wait_for(lambda: all(site.labels(pod).get(LABEL) == "underused" for pod in pods), "the marks", each_s=0.5)
    held = "gpu_reconciler_actions_skipped_total"
    wait_for(lambda: stage.read(held, reason="not_warned") >= 2, "cycles in which nothing is done", each_s=0.5)
    assert stage.read("gpu_reconciler_actions_total") == 0

    names = [HolderName("kubernetes", site.namespace, pod) for pod in pods]
    post(f"{stage.alertmanager}/api/v2/alerts", [alert(name, 7300) for name in names])
    batch = client.BatchV1Api(site.plane.api)

    def suspended() -> bool:
        return bool(batch.read_namespaced_job("train", site.namespace).spec.suspend)

    wait_for(suspended, "the Job to be suspended", each_s=0.5)
    wait_for(lambda: not site.pods("job-name=train"), "the controller to end its pods")
    cycles = stage.read("gpu_reconciler_cycles_total")
    wait_for(lambda: stage.read("gpu_reconciler_cycles_total") >= cycles + 3, "cycles that look for its end")
    assert stage.read("gpu_reconciler_actions_total") == 0, "the exporter still shows the pods as holders"
    post(f"{stage.prometheus}/api/v1/admin/tsdb/delete_series?match[]=gpu_allocation_info", None)
    wait_for(lambda: stage.read("gpu_reconciler_actions_total", action="suspend", result="done") == 1, "its count")
    assert ACTED in batch.read_namespaced_job("train", site.namespace).metadata.annotations
    records = [json.loads(text) for text in stage.audit.read_text("utf-8").splitlines()]
    acts = [each for each in records if each["action"] == "action"]
    (begun, *_), done = acts, acts[-1]
    assert (begun["target"], begun["waited_for"], begun["decisions"]) == (
        "batch/v1/Job/train",
        {"nvidia_com_gpu": 4},
        38.4,
    )
    # Twelve decisions on each of four tenants. One tenant counts for at most a fifth of all decisions.
    assert begun["receivers"] == ["gpu-owners"]
    assert (begun["result"], done["result"], done["id"]) == ("begins", "done", begun["id"])
    undo = "undo: kubectl patch -n whole-way jobs.batch train"
    assert f"batch/v1/Job/train in whole-way: suspend: done; {undo}" in stage.running.log()
    assert stage.running.log().count("suspend: done") == 1
