"""Lists the metrics that no rule, dashboard, command or runbook page reads, each with the question that it answers."""

from __future__ import annotations

import re
from functools import cache

from tools.files import ROOT

READERS = (
    *("alerts/rules/**/*.yaml", "alerts/*.yaml", "alerts/runbook.md", "grafana/dashboards/*.json"),
    *("exporter/gpu_exporter/reconciler/**/*.py", "exporter/gpu_exporter/reports/**/*.py"),
)
QUESTIONS = {
    "gpu_allocation_high_seconds_total": "For how long does a holder use its GPU above 70 %?",
    "gpu_allocation_idle_seconds_total": "How many of a holder's GPU-hours were idle?",
    "gpu_allocation_low_seconds_total": "For how long does a holder use its GPU below 10 %?",
    "gpu_allocation_processes": "How many processes of the holder have a context on the GPU?",
    "gpu_allocation_stalled_seconds_total": "How many of a holder's GPU-hours passed without progress?",
    "gpu_devices_unattributed": "Of how many GPUs of the node is the holder unknown?",
    "gpu_devices_visible": "How many GPUs of the node answer?",
    "gpu_energy_joules_total": "How much energy did a GPU use since the driver was loaded?",
    "gpu_exporter_attribution_conflicts_total": "How often do two sources name different holders for one GPU?",
    "gpu_exporter_jobs_missed_total": "How many ended jobs lack hours?",
    "gpu_exporter_task_failures_total": "Which part of the exporter failed, and how often?",
    "gpu_exporter_web_config_success": "Is the last version of the web configuration in force?",
    "gpu_fabric_not_ready_seconds": "For how long has a GPU waited for the NVLink fabric?",
    "gpu_fabric_status": "Is a GPU registered with the NVLink fabric, and if not, why?",
    "gpu_graphics_active_seconds_total": "How long was any compute or graphics engine active?",
    "gpu_idle_seconds_total": "How long was a GPU idle, held or not?",
    "gpu_idle_witnesses": "How many signals can prove that this GPU is idle?",
    "gpu_memory_clock_hertz": "At which clock does the memory of a GPU run?",
    "gpu_memory_free_bytes": "How much memory could another process use?",
    "gpu_memory_reserved_bytes": "How much memory does the driver keep for itself?",
    "gpu_mig_busy_seconds_total": "How long was a MIG instance busy?",
    "gpu_mig_energy_joules_total": "How much energy did a MIG instance use, by estimate?",
    "gpu_mig_idle_seconds_total": "How long was a MIG instance idle, held or not?",
    "gpu_mig_idle_witnesses": "How many signals can prove that this MIG instance is idle?",
    "gpu_mig_last_active_timestamp_seconds": "When was a MIG instance last active?",
    "gpu_mig_observed_seconds_total": "For how long is the activity of a MIG instance known?",
    "gpu_mig_temperature_celsius": "How hot is the board of a MIG instance?",
    "gpu_mig_unassigned_energy_joules_total": "How much energy of a board belongs to no MIG instance?",
    "gpu_mig_unattributed_busy_seconds_total": "How much busy time of a MIG instance belongs to no known holder?",
    "gpu_mig_unattributed_energy_joules_total": "How much energy of a shared MIG instance belongs to no known holder?",
    "gpu_nvswitch_sxid_errors_total": "How often did an NVSwitch report each SXid?",
    "gpu_nvswitch_sxid_last_timestamp_seconds": "When did an NVSwitch last report a fatal SXid?",
    "gpu_nvlink_errors_total": "How often did the NVLinks of a GPU repeat or recover?",
    "gpu_nvlinks_down_seconds": "For how long has no NVLink of a GPU been up?",
    "gpu_nvlinks_active": "How many NVLinks of a GPU are up?",
    "gpu_pcie_link_bytes_per_second": "How fast is the PCIe link now? At rest it is slower.",
    "gpu_pcie_link_max_bytes_per_second": "How fast can the PCIe link be?",
    "gpu_performance_state": "In which performance state (P0 to P15) is a GPU?",
    "gpu_remapped_rows_failed": "Has a row remap of a GPU failed?",
    "gpu_remapped_rows_pending": "Does a row remap wait for a reset of the GPU?",
    "gpu_retired_pages": "How many memory pages did a GPU before Ampere retire?",
    "gpu_sm_active_seconds_total": "How many SMs had work, over time?",
    "gpu_sm_clock_max_hertz": "At which clock can the SMs run at most?",
    "gpu_sm_occupancy_ratio": "Which share of the possible warps do the SMs run?",
    "gpu_temperature_limit_celsius": "At which temperature does a GPU before Ada slow down?",
    "gpu_tenant_busy_gpu_seconds_total": "How many GPU-hours did a tenant use?",
    "gpu_tensor_active_seconds_total": "Does a training use the tensor cores?",
    "gpu_throttle_active": "Which reason slows a GPU down now?",
    "gpu_training_step_seconds": "How long is a step of a training?",
    "gpu_unattributed_busy_seconds_total": "How much busy time of a shared GPU belongs to no known holder?",
    "gpu_unattributed_energy_joules_total": "How much energy of a shared GPU belongs to no known holder?",
    "gpu_xid_errors_total": "How often did a GPU report each XID?",
}


@cache
def _read() -> frozenset[str]:
    texts = (path.read_text("utf-8") for pattern in READERS for path in ROOT.glob(pattern))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def is_read(name: str) -> bool:
    """Returns whether a rule, a dashboard, a command or the runbook reads this metric."""
    return name in _read()


def render_questions() -> list[str]:
    """Returns the lines of the section."""
    return [
        "",
        "## For your own queries",
        "",
        "No rule, dashboard, command or runbook page of gpu-exporter reads these metrics. Each answers a question:",
        "",
        "| metric | question |",
        "| --- | --- |",
        *(f"| `{name}` | {question} |" for name, question in QUESTIONS.items()),
    ]
