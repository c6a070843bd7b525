"""Defines the metric families of the ledger, the allocations and the exporter itself. No collector publishes them."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_exporter.agent.exposition import training
from gpu_exporter.common.model.holders import ALLOCATION_KEY
from gpu_exporter.common.model.metrics import Family

DEVICE_LABELS = ("gpu", "uuid")
MIG_LABELS = ("gpu", "uuid", "mig", "mig_uuid")
ALLOCATION_LABELS = ("gpu", "uuid", "mig", "mig_uuid", *ALLOCATION_KEY[2:])  # gpu and mig are indexes for people

GPU_INFO = Family(
    "gpu_info", "Identity of a GPU, always 1", ("name", "driver_version", "pci_bus_id", "minor", "mig_mode")
)
GPU_UP = Family(
    "gpu_up",
    "1 while the GPU answers, 0 while it is lost, missing or hung. Absent while it is intentionally unavailable "
    "(another kernel driver, asleep)",
)
GPU_CONDITION = Family(
    "gpu_condition",
    "Fault of the GPU, 1 while it lasts. unusable: work fails, or can fail. degraded: the GPU works, but not fully",
    ("condition", "severity"),
)
GPU_MISSING = Family(
    "gpu_missing",
    "1 for a GPU on the PCI bus that should answer, but never has, and that the driver does not list",
    ("pci_bus_id",),
    source="/sys/bus/pci/devices",
)
GPU_ALLOCATED = Family(
    "gpu_allocated",
    "1 if GPU or instance is held, 0 if free or closed (gpu_node_closed). Absent while unknown, used without an "
    "allocation, or free but not offered to pods",
)
GPU_ALLOCATABLE = Family(
    "gpu_allocatable",
    "1 if the kubelet offers the GPU or an instance to pods, held or not; 0 if not (device plugin down). "
    "Absent while unknown",
    source="PodResources GetAllocatableResources",
)
GPU_BUSY = Family(
    "gpu_busy_seconds_total",
    "Integral of utilization over time. rate(busy)/rate(observed) is the mean utilization over any window",
    source="nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
)
GPU_OBSERVED = Family("gpu_observed_seconds_total", "Time for which utilization is known. Its rate is the coverage")
GPU_IDLE = Family("gpu_idle_seconds_total", "Time with utilization 0 and every other readable witness quiet")
GPU_IDLE_WITNESSES = Family(
    "gpu_idle_witnesses",
    "Number of readable witnesses of idleness: utilization, GPM, PCIe, NVLink, power. Engines for video do not count",
)
GPU_LAST_ACTIVE = Family(
    "gpu_last_active_timestamp_seconds", "Unix time of the last known activity. Absent before the first activity"
)
_OTHER_ACTIVITY = (
    "Time with utilization 0 while another witness was active. If several were active, only the first in the order of "
    "docs/concepts.md counts. Absent before the first such time"
)
GPU_OTHER_ACTIVITY = Family("gpu_other_activity_seconds_total", _OTHER_ACTIVITY, ("witness",))
MIG_OTHER_ACTIVITY = Family("gpu_mig_other_activity_seconds_total", _OTHER_ACTIVITY, ("witness",), source="GPM")
GPU_UNATTRIBUTED_BUSY = Family(
    "gpu_unattributed_busy_seconds_total",
    "Integral of utilization that belongs to no known holder. It and the holders' busy time add up to the GPU's busy "
    "time, with a delay of seconds",
)
GPU_UNATTRIBUTED_ENERGY = Family("gpu_unattributed_energy_joules_total", "Energy that belongs to no known holder")
UNIT_FAMILIES = (
    GPU_BUSY,
    GPU_OBSERVED,
    GPU_IDLE,
    GPU_IDLE_WITNESSES,
    GPU_LAST_ACTIVE,
    GPU_UNATTRIBUTED_BUSY,
    GPU_UNATTRIBUTED_ENERGY,
)
MIG_UNIT_FAMILIES = tuple(
    Family(family.name.replace("gpu_", "gpu_mig_", 1), family.help, source="GPM") for family in UNIT_FAMILIES
)

GPU_XID_EVENTS = Family(
    "gpu_xid_events_total",
    "XIDs by class (application, hardware, information). Published as 0 before the first, so that increase() sees the "
    "first",
    ("class",),
    source="nvmlEventSetWait_v2, with --collector.xid.kmsg /dev/kmsg too",
)
GPU_XID_ERRORS = Family(
    "gpu_xid_errors_total",
    "XIDs by code. Absent before the first XID with this code",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
GPU_XID_LAST = Family(
    "gpu_xid_last_timestamp_seconds",
    "Unix time of the last XID with this code. Absent before the first",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
XID_FAMILIES = (GPU_XID_EVENTS, GPU_XID_ERRORS, GPU_XID_LAST)

NVSWITCH_SXIDS = Family(
    "gpu_nvswitch_sxid_errors_total",
    "SXids (errors of an NVSwitch) by code and severity (fatal, nonfatal, unknown). Absent before the first SXid with "
    "this code",
    ("pci_bus_id", "sxid", "severity"),
    source="/dev/kmsg, with --collector.xid.kmsg",
)
NVSWITCH_SXID_LAST = Family(
    "gpu_nvswitch_sxid_last_timestamp_seconds",
    "Unix time of the NVSwitch's last SXid with this code. Absent before the first",
    ("pci_bus_id", "sxid", "severity"),
    source="/dev/kmsg, with --collector.xid.kmsg",
)

ALLOCATION_INFO = Family(
    "gpu_allocation_info",
    "Holder of the GPU or MIG instance, always 1",
    (
        "slurm_cluster",
        "user",
        "account",
        "partition",
        "qos",
        "array_job_id",
        "array_task_id",
        "het_job_id",
        "het_job_offset",
        "pod_uid",
        "source",
        "share",
        "resource",
        "identity",
    ),
)
ALLOCATION_SHARE = Family(
    "gpu_allocation_share_ratio",
    "Share of the GPU that the holder has: 1 for a whole GPU, its part of the slices for MIG, 1/holders if shared",
)
ALLOCATION_HOLDER_UNITS = Family(
    "gpu_allocation_holder_units",
    "GPUs and MIG instances that the pod or job holds on all nodes, as its scheduler counts them. Absent without a "
    "count",
)
ALLOCATION_START = Family(
    "gpu_allocation_start_timestamp_seconds",
    "Unix time of the allocation's start, from the scheduler; without it, when the exporter first saw the holder",
)
ALLOCATION_LAST_ACTIVE = Family(
    "gpu_allocation_last_active_timestamp_seconds",
    "Unix time of this holder's last activity; before the first, of its start. Absent where activity cannot be read",
)
ALLOCATION_IDLE_RUN = Family(
    "gpu_allocation_idle_run_seconds",
    "Length of the current idle run, without unknown time (docs/concepts.md). Absent while the GPU does not answer, "
    "or its holder does not run",
)
ALLOCATION_IDLE_WITNESSES = Family(
    "gpu_allocation_idle_run_witnesses",
    "Number of witnesses of the current idle run, the lowest during the run. 0 without an idle run. Absent like "
    "gpu_allocation_idle_run_seconds",
)
ALLOCATION_LONGEST_GAP = Family(
    "gpu_allocation_idle_gap_longest_seconds",
    "Longest idle run of this holder that ended with work. Absent before the first such run",
)
ALLOCATION_HELD = Family("gpu_allocation_held_seconds_total", "Time held since the exporter first saw the holder")
ALLOCATION_BUSY = Family(
    "gpu_allocation_busy_seconds_total",
    "Integral of utilization while held. For a shared GPU, only the holder's own part",
)
ALLOCATION_OBSERVED = Family("gpu_allocation_observed_seconds_total", "Time held for which utilization is known")
ALLOCATION_IDLE = Family(
    "gpu_allocation_idle_seconds_total", "Time held with utilization 0 and every other witness quiet"
)
ALLOCATION_LOW = Family(
    "gpu_allocation_low_seconds_total", "Time held with utilization below ledger.low_ratio (default 0.10)"
)
ALLOCATION_HIGH = Family(
    "gpu_allocation_high_seconds_total", "Time held with utilization at or above ledger.high_ratio (default 0.70)"
)
ALLOCATION_STALLED = Family(
    "gpu_allocation_stalled_seconds_total",
    "Time held in stalls (docs/stalls.md), which is not in gpu_allocation_busy_seconds_total. A stall counts after "
    "stalls.after (default 15m)",
)
ALLOCATION_STALLED_RUN = Family(
    "gpu_allocation_stalled_run_seconds",
    "Length of the present stall at medium or high confidence, 0 without one. Absent for MIG, shared GPUs, and boards "
    "whose power cannot show it",
)
ALLOCATION_ENERGY = Family(
    "gpu_allocation_energy_joules_total",
    "Energy of the holder, by method: board (whole GPU), mig (estimate), busy_time (shared GPU: energy at rest "
    "divided equally, the remainder by busy time)",
    ("method",),
)
ENERGY_METHODS, ENERGY_DIVIDED = {"none": "board", "mig": "mig"}, "busy_time"  # by Allocation.share
ALLOCATION_UTILIZATION = Family(
    "gpu_allocation_utilization_ratio",
    "Utilization of the holder's GPU or instance. If shared: by the holder's own processes, absent while unknown",
)
ALLOCATION_MEMORY = Family(
    "gpu_allocation_memory_used_bytes",
    "Memory in use on the holder's GPU or instance. If shared: by the holder's own processes, absent while a process "
    "has an unknown holder",
)
ALLOCATION_PROCESSES = Family(
    "gpu_allocation_processes",
    "The holder's processes on its GPU or instance. Absent while a process there has an unknown holder",
)
ALLOCATION_POWER = Family(
    "gpu_allocation_power_watts", "Power of the whole GPU, or estimate for the MIG instance. Absent if shared"
)
ALLOCATION_TEMPERATURE = Family(
    "gpu_allocation_temperature_celsius",
    "Temperature of the board, which has one sensor for all its instances. Absent if shared",
)
ALLOCATION_HOST_ACTIVITY = Family(
    "gpu_allocation_host_activity_ratio",
    "CPU use of the holder on this node, as a share of gpu_allocation_host_cpus: ten-minute mean, the same for each "
    "GPU. Absent while unknown",
)
ALLOCATION_HOST_CPUS = Family(
    "gpu_allocation_host_cpus",
    "The holder's CPUs on this node: its quota or cpuset, otherwise the host's CPUs by its part of the GPUs. Absent "
    "while unknown",
)
ALLOCATION_HOST_IO = Family(
    "gpu_allocation_host_io_bytes_per_second",
    "Bytes per second of the holder on this node's block devices: ten-minute mean, the same for each GPU. Without "
    "network file systems. Absent while unknown",
)
ALLOCATION_UNKNOWN = Family(
    "gpu_allocation_activity_unknown",
    "Reason why gpu_allocation_idle_run_seconds is absent, always 1 (docs/concepts.md)",
    ("reason",),
)
ALLOCATION_STATE = Family(
    "gpu_allocation_state",
    "Current state of the allocation, always 1. For display and group_left, not for alerts over a range",
    ("state",),
)
ALLOCATION_CAUSE = Family(
    "gpu_allocation_cause",
    "1 for each cause of the current state with medium or high confidence, at most two (docs/causes.md)",
    ("cause", "confidence"),
)
ALLOCATION_CAUSE_VALUE = Family(
    "gpu_allocation_cause_value",
    "Numbers behind gpu_allocation_cause, at most three for each cause, in the unit that the label quantity names "
    "(docs/causes.md)",
    ("cause", "quantity"),
)

BUILD_INFO = Family("gpu_exporter_build_info", "Version and backend of the exporter, always 1", ("version", "backend"))
DRIVER_UP = Family(
    "gpu_driver_up",
    "1 while the driver answers, 0 without a driver, or while it hangs for every GPU. No fault if "
    "gpu_devices_expected is 0",
)
DEVICES_VISIBLE = Family("gpu_devices_visible", "GPUs that answer")
DEVICES_EXPECTED = Family(
    "gpu_devices_expected",
    "GPUs that should answer: on the bus with the vendor's driver, in the driver's list, or seen here before. If there "
    "are none, the number that a scheduler counts",
)
DEVICES_UNATTRIBUTED = Family(
    "gpu_devices_unattributed",
    "GPUs and MIG instances of which the exporter does not know whether they are held. Absent without a source of "
    "holders",
)
DEVICES_UNMANAGED = Family(
    "gpu_devices_unmanaged",
    "GPUs on the bus with another kernel driver (vfio-pci, nouveau, none). They are not read, and do not count as lost",
    ("driver",),
    source="/sys/bus/pci/devices",
)
SAMPLE_INTERVAL = Family(
    "gpu_exporter_sample_interval_seconds",
    "Time between two updates of the values: the larger of the sampling interval and --textfile.interval",
)
TENANT_LABELS = ("scheduler", "namespace", "account", "user")
TENANT_HELD = Family(
    "gpu_tenant_held_gpu_seconds_total",
    "GPU-seconds that the tenant held on this node, each GPU by the share held. Includes pods and jobs that start and "
    "end between two scrapes",
)
TENANT_KNOWN = Family("gpu_tenant_known_gpu_seconds_total", "GPU-seconds held with known utilization")
TENANT_BUSY = Family("gpu_tenant_busy_gpu_seconds_total", "Integral of utilization over the GPU-seconds held")
TENANT_IDLE = Family(
    "gpu_tenant_idle_gpu_seconds_total", "GPU-seconds held with utilization 0 and every other witness quiet"
)
TENANT_STALLED = Family(
    "gpu_tenant_stalled_gpu_seconds_total", "GPU-seconds held in stalls, neither busy nor idle (docs/stalls.md)"
)
TENANT_ENERGY = Family(
    "gpu_tenant_energy_joules_total",
    "Energy of GPUs and MIG instances while a tenant held them. If shared, only the tenant's part",
)
TENANT_UNPROVEN = Family(
    "gpu_tenant_unproven_gpu_seconds_total",
    "GPU-seconds held with utilization 0 but no second witness (gpu_idle_witnesses). They count neither as busy nor "
    "as idle. Absent without such time",
)
TENANT_FAMILIES = (
    TENANT_HELD,
    TENANT_KNOWN,
    TENANT_BUSY,
    TENANT_IDLE,
    TENANT_ENERGY,
    TENANT_STALLED,
    TENANT_UNPROVEN,
)
LAST_SAMPLE = Family(
    "gpu_exporter_last_sample_timestamp_seconds",
    "Unix time at which a GPU last answered. Absent before the first answer",
)
STATE_LAST_WRITE = Family(
    "gpu_exporter_state_last_write_timestamp_seconds",
    "Unix time of the last write of the state file. Published counters have its values. Absent before the first "
    "write, and without state",
)
STATE_WRITE_ERRORS = Family(
    "gpu_exporter_state_write_errors_total", "Failed writes of the state file. Absent without state"
)
COLLECTOR_SUCCESS = Family(
    "gpu_exporter_collector_success",
    "1 if the collector's last cycle had no error on any GPU, 0 otherwise. Missing data is not an error",
    ("collector",),
)
COLLECTOR_DURATION = Family(
    "gpu_exporter_collector_duration_seconds",
    "Duration of the collector's last cycle, the longest of all GPUs",
    ("collector",),
)
DRIVER_ERRORS = Family(
    "gpu_exporter_driver_errors_total", "Failed driver calls and discarded answers", ("call", "error")
)
TASK_FAILURES = Family(
    "gpu_exporter_task_failures_total",
    "Internal errors, by task. The task skipped one turn and continued. The log has the error",
    ("task",),
)
WEB_CONFIG_SUCCESS = Family(
    "gpu_exporter_web_config_success",
    "1 if all of --web.config.file is in use, 0 if the exporter refused the last change or a part of it. Absent "
    "without the file",
)
ATTRIBUTION_UP = Family(
    "gpu_exporter_attribution_up",
    "1 if the source of holders answered when it was last asked, 0 otherwise",
    ("source",),
)
ATTRIBUTION_COMPLETE = Family(
    "gpu_exporter_attribution_complete",
    "1 if the source reports every holder with its device, 0 otherwise",
    ("source",),
)
NODE_CLOSED = Family(
    "gpu_node_closed",
    "1 while the scheduler has closed this node; state is down, drained or reserved. GPUs without a holder are not "
    "free then. Absent while the node is open, and while its state is unknown",
    ("source", "state"),
)
ATTRIBUTION_LAST_SUCCESS = Family(
    "gpu_exporter_attribution_last_success_timestamp_seconds",
    "Unix time of the data in the source's last answer. Absent before the first answer",
    ("source",),
)
JOBS_MISSED = Family(
    "gpu_exporter_jobs_missed_total",
    "Jobs that ended before the exporter knew their GPUs or times, or beside another job on the same GPU. All or a "
    "part of their hours are missing in the counters of tenants",
    ("source",),
)
ATTRIBUTION_CONFLICTS = Family(
    "gpu_exporter_attribution_conflicts_total",
    "Polls in which the source contradicted a source of higher precedence, or a process on a GPU contradicted the "
    "source",
    ("source",),
)
SELF_FAMILIES = (
    BUILD_INFO,
    DRIVER_UP,
    DEVICES_VISIBLE,
    DEVICES_EXPECTED,
    DEVICES_UNATTRIBUTED,
    DEVICES_UNMANAGED,
    SAMPLE_INTERVAL,
    LAST_SAMPLE,
    STATE_LAST_WRITE,
    STATE_WRITE_ERRORS,
    COLLECTOR_SUCCESS,
    COLLECTOR_DURATION,
    DRIVER_ERRORS,
    TASK_FAILURES,
    WEB_CONFIG_SUCCESS,
    ATTRIBUTION_UP,
    ATTRIBUTION_COMPLETE,
    NODE_CLOSED,
    ATTRIBUTION_LAST_SUCCESS,
    JOBS_MISSED,
    ATTRIBUTION_CONFLICTS,
)


def fixed_groups() -> Iterator[tuple[str, tuple[str, ...], tuple[Family, ...]]]:
    """Yields title, labels and families of each group that no collector publishes, for docs/metrics.md."""
    yield (
        "GPU: identity and ledger",
        DEVICE_LABELS,
        (GPU_INFO, GPU_UP, GPU_CONDITION, GPU_ALLOCATED, GPU_ALLOCATABLE, *UNIT_FAMILIES, GPU_OTHER_ACTIVITY),
    )
    yield "GPU on the PCI bus that the driver does not list", (), (GPU_MISSING,)
    yield "GPU: collector `xid`, published for a lost GPU too", DEVICE_LABELS, XID_FAMILIES
    yield "NVSwitch: reported by the kernel's log", (), (NVSWITCH_SXIDS, NVSWITCH_SXID_LAST)
    yield "MIG instance: ledger", MIG_LABELS, (*MIG_UNIT_FAMILIES, MIG_OTHER_ACTIVITY)
    yield "Allocation: one holder on one GPU or MIG instance", ALLOCATION_LABELS, _list_families("gpu_allocation_")
    yield "Training: what the job of an allocation reports of itself", ALLOCATION_LABELS, training.FAMILIES
    yield "Tenant: a namespace, or an account and user of Slurm", TENANT_LABELS, TENANT_FAMILIES
    yield "The exporter itself", (), SELF_FAMILIES


def _list_families(prefix: str) -> tuple[Family, ...]:
    """Returns the families of this module whose names start with `prefix`, in the order of their definition."""
    return tuple(each for each in globals().values() if isinstance(each, Family) and each.name.startswith(prefix))
