"""How long a real Prometheus needs to evaluate the rules for a site of a given size.

    python -m tests.bench.rules [--nodes 1000] [--idle 2]

The data are eight GPUs per node, each held by its own pod or job. Two of them are idle, so that an alert is active for
each. There are also the series of kube-state-metrics and kube-prometheus about the pods, and half an hour of samples
every 30 s. Prints, for each group, the seconds of its last evaluation and its interval, its three most expensive rules,
and the memory of Prometheus.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.servers import Prometheus

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 30
WINDOW_S = 2100
HELD_S = 90_000.0
KUBE = {  # further labels of each pod
    "kube_pod_labels": ',label_team="t{number}",label_kueue_x_k8s_io_queue_name="q{number}"',
    "kube_pod_status_phase": ',phase="Running"',
    "kube_pod_container_resource_requests": ',container="main",resource="nvidia_com_gpu"',
    "namespace_workload_pod:kube_pod_owner:relabel": ',workload="train-{number}",workload_type="job"',
    "kube_pod_owner": ',owner_is_controller="true",owner_kind="ReplicaSet",owner_name="train-{number}"',
    "kube_pod_info": ',host_network="false",pod_ip="ip-{i}"',
    "kube_service_info": ',service="train-{number}",cluster_ip="None"',
    "kube_endpoint_address": ',endpoint="train-{number}",ip="ip-{i}"',
    "kube_endpointslice_endpoints": ',endpointslice="train-{number}-x7k2p",targetref_kind="Pod",targetref_name="train-{i:06d}"',
    "kube_replicaset_owner": ',owner_is_controller="true",owner_kind="Deployment",owner_name="train-{number}",replicaset="train-{number}"',
    "kube_horizontalpodautoscaler_info": ',scaletargetref_kind="Deployment",scaletargetref_name="web-{number}"',
}
OTHERS = 80  # series of other pods in each of these, for each node
KUBE_OF_ALL = ("kube_endpointslice_endpoints", "kube_endpoint_address", "kube_replicaset_owner", "kube_service_info")


def write_history(path: Path, nodes: int, idle: int, end: int) -> int:
    """Write OpenMetrics text, with all rows of a family together; returns the number of series."""
    times = range(end - WINDOW_S, end + 1, STEP_S)
    series = 0

    def node_labels(node: int) -> str:
        return f'job="gpu-exporter",node="n{node}",instance="n{node}"'

    def gpu_labels(node: int, gpu: int) -> str:
        return f'{node_labels(node)},gpu="{gpu}",uuid="GPU-{node:05d}-{gpu}"'

    def held_labels(node: int, gpu: int) -> str:
        i = node * 8 + gpu
        if i % 2:
            return f'{gpu_labels(node, gpu)},scheduler="slurm",job_id="{4_000_000 + i}"'
        pod = f'namespace="team-{i % 97}",pod="train-{i:06d}",container="main"'
        return f'{gpu_labels(node, gpu)},scheduler="kubernetes",{pod}'

    def rows(name: str) -> Iterator[tuple[str, float, float]]:
        """Labels, the last value, and its growth per second."""
        for node in range(nodes):
            mine = node_labels(node)
            if name == "kube_node_labels":
                yield f'job="kube-state-metrics",node="n{node}",label_node_pool="p{node % 7}"', 1.0, 0.0
                continue
            if name in KUBE:
                for i in range(node * 8, node * 8 + 8, 2):
                    pod = f'namespace="team-{i % 97}",pod="train-{i:06d}"'
                    yield f'job="kube-state-metrics",{pod}{KUBE[name].format(number=i % 13, i=i)}', 1.0, 0.0
                for i in range(node * OTHERS, node * OTHERS + OTHERS if name in KUBE_OF_ALL else 0):
                    other = KUBE[name].format(number=i % 13, i=i).replace("train", "web").replace("ip-", "other-")
                    yield f'job="kube-state-metrics",namespace="web-{i % 97}",pod="web-{i:06d}"{other}', 1.0, 0.0
                continue
            if name.startswith("gpu_exporter_") or name in ("gpu_driver_up", "gpu_devices_expected", "up"):
                more = ',source="kubelet"' if "attribution" in name else ""
                value = (
                    float(end) if name.endswith("timestamp_seconds") else {"gpu_devices_expected": 8.0}.get(name, 1.0)
                )
                value = 0.0 if "errors" in name else value
                yield mine + more, value, 1.0 if name.endswith("timestamp_seconds") else 0.0
                continue
            if name.startswith("gpu_tenant_"):
                yield f'{mine},scheduler="kubernetes",namespace="team-{node % 97}"', 1e6, 8.0
                continue
            for gpu in range(8):
                is_idle = gpu < idle
                if name.startswith("gpu_allocation_cause"):  # of each idle GPU: two causes, three numbers for each
                    if not is_idle:
                        continue
                    for cause in ("no_process", "cpu_oversubscribed"):
                        of_it = f'{held_labels(node, gpu)},cause="{cause}"'
                        if name.endswith("_value"):
                            yield from ((f'{of_it},quantity="{each}"', 4.0, 0.0) for each in ("cpus", "steps", "gpus"))
                        else:
                            yield f'{of_it},confidence="high"', 1.0, 0.0
                elif name.startswith("gpu_allocation_"):
                    labels = held_labels(node, gpu)
                    if name.endswith("info"):
                        labels += f',user="u{node % 500}",account="a{node % 40}",resource="nvidia.com/gpu"'
                    value, growth = {
                        "gpu_allocation_held_seconds_total": (HELD_S, 1.0),
                        "gpu_allocation_observed_seconds_total": (HELD_S, 1.0),
                        "gpu_allocation_busy_seconds_total": (HELD_S / 2, 0.5),
                        "gpu_allocation_energy_joules_total": (1e7, 300.0),
                        "gpu_allocation_idle_run_seconds": (7200.0 if is_idle else 10.0, 0.0),
                        "gpu_allocation_start_timestamp_seconds": (end - HELD_S, 0.0),
                        "gpu_allocation_memory_used_bytes": (4e9, 0.0),
                    }.get(name, (1.0, 0.0))
                    yield labels, value, growth
                elif name == "gpu_throttle_seconds_total":
                    for reason in ("thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "board_limit", "power_cap"):
                        yield f'{gpu_labels(node, gpu)},reason="{reason}"', 10.0, 0.0
                elif name == "gpu_info":
                    yield f'{gpu_labels(node, gpu)},name="NVIDIA H100 80GB HBM3"', 1.0, 0.0
                elif name == "gpu_ecc_errors_total":
                    yield f'{gpu_labels(node, gpu)},severity="uncorrected"', 0.0, 0.0
                else:
                    yield gpu_labels(node, gpu), 1.0 if name in ("gpu_up", "gpu_allocated") else 0.0, 0.0

    names = sorted(
        [
            *(f"gpu_allocation_{kind}_seconds_total" for kind in ("held", "observed", "busy")),
            *("gpu_allocation_energy_joules_total", "gpu_allocation_idle_run_seconds", "gpu_allocation_info"),
            *(*KUBE, "kube_node_labels", "gpu_allocation_memory_used_bytes"),
            *("gpu_allocation_holder_units", "gpu_allocation_share_ratio", "gpu_allocation_start_timestamp_seconds"),
            *("gpu_up", "gpu_info", "gpu_allocated", "gpu_throttle_seconds_total", "gpu_recovery_action"),
            *("gpu_ecc_errors_total", "gpu_remapped_rows_failed", "gpu_remapped_rows_pending"),
            *("gpu_last_active_timestamp_seconds", "gpu_driver_up", "gpu_devices_expected", "up"),
            *("gpu_exporter_last_sample_timestamp_seconds", "gpu_exporter_sample_interval_seconds"),
            *("gpu_exporter_attribution_up", "gpu_exporter_attribution_last_success_timestamp_seconds"),
            *("gpu_exporter_state_write_errors_total", "gpu_exporter_state_last_write_timestamp_seconds"),
            *(f"gpu_tenant_{kind}_gpu_seconds_total" for kind in ("held", "known", "busy", "idle")),
            *("gpu_tenant_energy_joules_total", "gpu_allocation_cause", "gpu_allocation_cause_value"),
        ]
    )
    with path.open("w", encoding="utf-8") as out:
        for name in names:
            for labels, value, growth in rows(name):
                series += 1
                head = f"{name}{{{labels}}} "
                if growth:
                    out.write("".join([f"{head}{value - growth * (end - at)} {at}\n" for at in times]))
                else:
                    out.write("".join([f"{head}{value} {at}\n" for at in times]))
        out.write("# EOF\n")
    return series


def active(groups: list[dict[str, Any]]) -> int:
    """The number of alerts that are pending or firing."""
    return sum(len(rule.get("alerts", [])) for group in groups for rule in group["rules"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=2, help="GPUs of each node that are held idle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        directory = Path(name)
        # Rules read the present, and Prometheus accepts no sample older than its last block: start it when the block ends.
        end = int(time.time()) + 30 + options.nodes // 4
        series = write_history(directory / "history.txt", options.nodes, options.idle, end)
        source = [str(directory / "history.txt"), str(directory / "data")]
        subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", *source], check=True, stdout=subprocess.DEVNULL
        )
        (directory / "history.txt").unlink()
        assert time.time() < end, "writing the history took too long"
        wait_for(lambda: time.time() > end or None, "the end of the history", 1200, 0.5)
        rules = sorted((ROOT / "alerts" / "rules").glob("*.yaml"))
        prometheus = Prometheus(processes, directory, {}, rules=rules)

        def groups() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(fetch(f"{prometheus.url}/api/v1/rules") or "{}")["data"]["groups"]
            return found

        # The owners' alerts follow one evaluation after their inputs; the series that they need exist one evaluation later.
        wait_for(lambda: active(groups()) or None, "the alerts of owners", 400, 1.0)
        began = time.time()
        wait_for(lambda: time.time() - began > 70 or None, "one more evaluation of each group", each_s=1.0)
        age = time.time() - end
        print(f"{options.nodes} nodes, {options.nodes * 8} GPUs, {series} series, the last sample {age:.0f} s ago")
        for group in groups():
            print(f"{group['name']}: {group['evaluationTime']:.2f} s of {group['interval']} s")
            for rule in sorted(group["rules"], key=lambda rule: -rule["evaluationTime"])[:3]:
                print(f"    {rule['name']}: {rule['evaluationTime']:.2f} s")
        idle = prometheus.query("count(allocation:gpu_idle_run_seconds:proven)")
        memory = Path(f"/proc/{prometheus.running.process.pid}/status").read_text("ascii")
        rss = next(line.split()[1] for line in memory.splitlines() if line.startswith("VmRSS"))
        print(
            f"active alerts: {active(groups())}, proven idle: {idle[0][1] if idle else 0:.0f}; Prometheus {int(rss) / 1024:.0f} MiB"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
