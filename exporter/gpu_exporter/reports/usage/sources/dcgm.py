"""dcgm-exporter: holders by its pod labels or by hpc_job, and the utilization and engine activity of their GPUs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.cells import HolderId, PlacedSeries, Unit
from gpu_exporter.reports.usage.model import FLOORS
from gpu_exporter.reports.usage.sources.gauges import Gauges, Read
from gpu_exporter.reports.usage.sources.intervals import TARGET, target_of

NAME = "dcgm-exporter"
UTILIZATION, ENGINE = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
VIDEO = ("DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_DEC_UTIL")
# Of its default list. dcgm-exporter has repeated old values after a restart of the host engine
# (NVIDIA/gpu-monitoring-tools#188).
COUNTER = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
# Fields of its default list, with the limits of the witnesses of gpu-exporter's agent (docs/concepts.md). Peers and
# copy engines read and write the memory of a GPU that computes nothing.
TRAFFIC = {
    "DCGM_FI_PROF_PCIE_RX_BYTES": 10e6,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 10e6,
    "DCGM_FI_PROF_DRAM_ACTIVE": FLOORS[-1],
}
MIB = 2.0**20
NO_JOB = ("", "0")
OWN = re.compile(
    ".*(dcgm|exporter|gpu-metrics).*"
)  # the exporter's own pod, where the server has no `up` of the target


def gauges() -> Gauges:
    """Returns the names and labels of dcgm-exporter."""
    # A copy for each pod that shares a GPU stands beside a series of the GPU itself (--kubernetes-virtual-gpus).
    held = ('exported_pod!=""', 'hpc_job!="",hpc_job!="0"', f'exported_pod="",pod!="",pod!~"{OWN.pattern}"')
    return Gauges(
        NAME, UTILIZATION, 100.0, ENGINE, "DCGM_FI_DEV_FB_USED", MIB, ("UUID", "GPU_I_ID"), "UUID", "GPU_I_ID", held,
        VIDEO, COUNTER, TRAFFIC, _build_reader,
    )  # fmt: skip


def _build_reader(history: History, span: WindowSpan, found: Collection[Labels]) -> Read:
    """Prometheus puts the exporter's own pod into `pod` of each free GPU, and without honor_labels the holder into
    exported_pod.
    """
    renamed = {target_of(labels) for labels in found if dict(labels).get("exported_pod")}
    jobs = "|".join(sorted({literal(dict(labels).get("job", "")) for labels in found}))

    def build(seconds: float) -> str:
        targets = over("last", f'up{{job=~"{jobs}",pod!=""}}', seconds)
        return f"group by ({', '.join(TARGET)}, namespace, pod) ({targets})"

    own: defaultdict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
    for series in history.ask_whole("targets", build, span):
        labels = dict(series)
        own[target_of(series)].add((labels.get("namespace", ""), labels["pod"]))
    return lambda labels: read_labels(labels, own, renamed)


def read_labels(
    labels: Mapping[str, str],
    own: Mapping[tuple[str, ...], set[tuple[str, str]]],
    renamed: Collection[tuple[str, ...]],
) -> PlacedSeries:
    """Returns the unit and the holder in the labels of a series.

    `own`: pods of the targets themselves. `renamed`: targets whose holders are in exported_pod.
    """
    get = labels.get
    cluster = get("cluster", "")
    node = get("Hostname") or get("hostname") or get("node") or get("instance", "").rpartition(":")[0]
    board = get("UUID") or get("uuid") or f"{node}/{get('device') or get('gpu', '')}"
    unit = Unit(cluster, node, board, get("GPU_I_ID", ""), get("GPU_I_PROFILE", ""), get("modelName", ""))
    target = tuple(get(name, "") for name in TARGET)
    namespace, name = get("exported_namespace", ""), get("exported_pod", "")
    if not name and target not in renamed:
        namespace, name = get("namespace", ""), get("pod", "")
        of_target = own.get(target)
        is_own = (namespace, name) in of_target if of_target else OWN.fullmatch(name)
        name = "" if is_own else name
    pod = HolderId(cluster, "kubernetes", namespace, name) if name else None
    if (job := get("hpc_job", "")) not in NO_JOB:
        return PlacedSeries(unit, HolderId(cluster, "slurm", "", job), pod)
    return PlacedSeries(unit, pod)
