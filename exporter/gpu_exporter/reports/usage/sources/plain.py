"""nvidia_gpu_exporter, and the exporter of jobstats (a fork of nvidia_gpu_prometheus_exporter)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpu_exporter.reports.history.asking import History, Labels, WindowSpan, over
from gpu_exporter.reports.usage.cells import HolderId, PlacedSeries, Unit
from gpu_exporter.reports.usage.sources.gauges import Gauges, Read

NVIDIA_GPU_EXPORTER, JOBSTATS = "nvidia_gpu_exporter", "nvidia_gpu_prometheus_exporter"
SMI_UTILIZATION, SMI_INFO = "nvidia_smi_utilization_gpu_ratio", "nvidia_smi_gpu_info"
DUTY_CYCLE = "nvidia_gpu_duty_cycle"
NO_JOB = ("", "0", "-1")  # a file of the prolog without a job


def smi_gauges() -> Gauges:
    """Returns the names of nvidia_gpu_exporter, which reports no holder. Its info metric has the model."""
    return Gauges(
        NVIDIA_GPU_EXPORTER, SMI_UTILIZATION, 1.0, "", "nvidia_smi_memory_used_bytes", 1.0, ("uuid",), "uuid", "", (),
        (), "", {}, _build_smi_reader,
    )  # fmt: skip


def _build_smi_reader(history: History, span: WindowSpan, _: Collection[Labels]) -> Read:
    def build(seconds: float) -> str:
        return f"group by (cluster, uuid, name) ({over('last', SMI_INFO, seconds)})"

    models = {}
    for series in history.ask_whole("models", build, span):
        given = dict(series)
        models[given.get("cluster", ""), given.get("uuid", "")] = given.get("name", "")

    def read(labels: Mapping[str, str]) -> PlacedSeries:
        cluster, uuid = labels.get("cluster", ""), labels.get("uuid", "")
        return PlacedSeries(Unit(cluster, _node(labels), uuid, model=models.get((cluster, uuid), "")))

    return read


def jobstats_gauges() -> Gauges:
    """Returns the names of jobstats' exporter, which puts job and user id into each series."""
    held = ('jobid!="",jobid!="0",jobid!="-1"',)
    return Gauges(
        JOBSTATS, DUTY_CYCLE, 100.0, "", "nvidia_gpu_memory_used_bytes", 1.0, ("uuid", "GPU_I_ID"), "uuid", "GPU_I_ID",
        held, (), "", {}, lambda _history, _span, _found: _read_jobstats,
    )  # fmt: skip


def _read_jobstats(labels: Mapping[str, str]) -> PlacedSeries:
    get = labels.get
    cluster, job = get("cluster", ""), get("jobid", "")
    unit = Unit(cluster, _node(labels), get("uuid", ""), get("GPU_I_ID", ""), get("GPU_I_PROFILE", ""), get("name", ""))
    return PlacedSeries(unit, None if job in NO_JOB else HolderId(cluster, "slurm", "", job, get("userid", "")))


def _node(labels: Mapping[str, str]) -> str:
    return labels.get("node") or labels.get("hostname") or labels.get("instance", "").rpartition(":")[0]
