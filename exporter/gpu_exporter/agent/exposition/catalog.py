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
    "gpu_info",
    "gauge",
    "Identity of a GPU, always 1",
    ("name", "driver_version", "pci_bus_id", "minor", "mig_mode"),
)
GPU_UP = Family(
    "gpu_up",
    "gauge",
    "State of the GPU: 1 while it answers, 0 while it is lost, missing or hung. Absent while it is away on purpose",
)
GPU_MISSING = Family(
    "gpu_missing",
    "gauge",
    "GPU on the PCI bus that should answer but that the driver does not list, always 1. It has no UUID yet: a GPU "
    "that was seen before has gpu_up 0 instead",
    ("pci_bus_id",),
    source="/sys/bus/pci/devices",
)
GPU_ALLOCATED = Family(
    "gpu_allocated",
    "gauge",
    "Allocation of the GPU or its instances: 1 if held, 0 if free. Absent while holders are unknown, while a pod, "
    "job or container uses the GPU without holding it, and while no pod holds it and the kubelet does not offer it",
)
GPU_ALLOCATABLE = Family(
    "gpu_allocatable",
    "gauge",
    "Offer of the GPU or one of its instances to pods by the kubelet, held or not: 1 if offered, 0 if not (the "
    "device plugin is down, excludes it or reports it as unhealthy). Absent where the offer is unknown, as with "
    "Slurm and resource claims",
    source="PodResources GetAllocatableResources",
)
GPU_BUSY = Family(
    "gpu_busy_seconds_total",
    "counter",
    "Integral of utilization over time, in seconds. rate(busy)/rate(observed) is the mean utilization over any window",
    source="nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
)
GPU_OBSERVED = Family(
    "gpu_observed_seconds_total",
    "counter",
    "Time for which utilization is known, in seconds. Its rate is the coverage",
)
GPU_IDLE = Family(
    "gpu_idle_seconds_total",
    "counter",
    "Time with utilization exactly 0 and every other readable witness quiet, in seconds",
)
GPU_IDLE_WITNESSES = Family(
    "gpu_idle_witnesses",
    "gauge",
    "Number of witnesses of idleness that could be read: utilization, GPM, PCIe, NVLink, power. Engines for video do "
    "not count",
)
GPU_LAST_ACTIVE = Family(
    "gpu_last_active_timestamp_seconds",
    "gauge",
    "Unix time of the last activity that was seen. Absent before the first activity",
)
_OTHER_ACTIVITY = (
    "Time with utilization 0 that is not idle, in seconds since the exporter started, by the witness that was active. "
    "If several were active, the first in the order of docs/concepts.md counts. Absent before the witness is active"
)
GPU_OTHER_ACTIVITY = Family("gpu_other_activity_seconds_total", "counter", _OTHER_ACTIVITY, ("witness",))
MIG_OTHER_ACTIVITY = Family(
    "gpu_mig_other_activity_seconds_total", "counter", _OTHER_ACTIVITY, ("witness",), source="GPM"
)
GPU_UNATTRIBUTED_BUSY = Family(
    "gpu_unattributed_busy_seconds_total",
    "counter",
    "Integral of utilization that belongs to no known holder, in seconds: the GPU or instance had no holder, or "
    "several holders and the work was not theirs. Together with the busy time of the holders it equals the busy "
    "time of the GPU or instance, some seconds later",
)
GPU_UNATTRIBUTED_ENERGY = Family(
    "gpu_unattributed_energy_joules_total",
    "counter",
    "Energy that belongs to no known holder, in joules since the exporter first saw the GPU or instance",
)
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
    Family(family.name.replace("gpu_", "gpu_mig_", 1), family.type, family.help, source="GPM")
    for family in UNIT_FAMILIES
)

GPU_XID_EVENTS = Family(
    "gpu_xid_events_total",
    "counter",
    "Number of XIDs since the exporter started, by class (application, hardware, information). Exported as 0 before "
    "the first event, so that increase() sees the first event",
    ("class",),
    source="nvmlEventSetWait_v2, with --collector.xid.kmsg /dev/kmsg too",
)
GPU_XID_ERRORS = Family(
    "gpu_xid_errors_total",
    "counter",
    "Number of XIDs since the exporter started, by code. Absent before the first XID with this code",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
GPU_XID_LAST = Family(
    "gpu_xid_last_timestamp_seconds",
    "gauge",
    "Unix time at which this XID was last reported. Absent before the first report",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
XID_FAMILIES = (GPU_XID_EVENTS, GPU_XID_ERRORS, GPU_XID_LAST)

ALLOCATION_INFO = Family(
    "gpu_allocation_info",
    "gauge",
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
    "gauge",
    "Share of the GPU that the holder has: 1 for a whole GPU, its part of the slices for MIG, 1/holders if shared",
)
ALLOCATION_HOLDER_UNITS = Family(
    "gpu_allocation_holder_units",
    "gauge",
    "Number of GPUs and MIG instances that the holder (pod or job) holds on all nodes, as its scheduler counts "
    "them. Absent where the scheduler reports no number",
)
ALLOCATION_START = Family(
    "gpu_allocation_start_timestamp_seconds",
    "gauge",
    "Unix time of the start, as the scheduler reports it, otherwise when the holder was first seen",
)
ALLOCATION_LAST_ACTIVE = Family(
    "gpu_allocation_last_active_timestamp_seconds",
    "gauge",
    "Unix time of the last activity of this holder, or of its start before any activity. Absent where activity "
    "cannot be read",
)
ALLOCATION_IDLE_RUN = Family(
    "gpu_allocation_idle_run_seconds",
    "gauge",
    "Length of the current idle run, in seconds. Unknown time does not add to it. Activity resets it, and so does "
    "too much unknown time (a minute in sequence, a tenth in all). Absent while the GPU does not answer or its "
    "holder cannot work",
)
ALLOCATION_IDLE_WITNESSES = Family(
    "gpu_allocation_idle_run_witnesses",
    "gauge",
    "Lowest number of witnesses that any part of the current idle run rests on, 0 without an idle run. Absent while "
    "gpu_allocation_idle_run_seconds is absent",
)
ALLOCATION_LONGEST_GAP = Family(
    "gpu_allocation_idle_gap_longest_seconds",
    "gauge",
    "Longest idle run of this holder that ended with work, in seconds. Absent before the first such run",
)
ALLOCATION_HELD = Family("gpu_allocation_held_seconds_total", "counter", "Time held since first seen, in seconds")
ALLOCATION_BUSY = Family(
    "gpu_allocation_busy_seconds_total",
    "counter",
    "Integral of utilization while held, in seconds. For a shared GPU, only the holder's own part",
)
ALLOCATION_OBSERVED = Family(
    "gpu_allocation_observed_seconds_total", "counter", "Time held for which utilization is known, in seconds"
)
ALLOCATION_IDLE = Family(
    "gpu_allocation_idle_seconds_total",
    "counter",
    "Time held with utilization exactly 0 and every other witness quiet, in seconds",
)
ALLOCATION_LOW = Family(
    "gpu_allocation_low_seconds_total",
    "counter",
    "Time held with utilization below ledger.low_ratio (default 0.10), in seconds",
)
ALLOCATION_HIGH = Family(
    "gpu_allocation_high_seconds_total",
    "counter",
    "Time held with utilization at or above ledger.high_ratio (default 0.70), in seconds",
)
ALLOCATION_STALLED = Family(
    "gpu_allocation_stalled_seconds_total",
    "counter",
    "Time held fully busy, at low power and without a sign of progress, in seconds (docs/stalls.md). Not part of "
    "gpu_allocation_busy_seconds_total. Counted once the run has lasted for stalls.after (default 15m)",
)
ALLOCATION_STALLED_RUN = Family(
    "gpu_allocation_stalled_run_seconds",
    "gauge",
    "Length of the present stall, in seconds, at medium or high confidence. 0 if the holder is not stalled. Absent "
    "while unknown: MIG, shared GPUs, boards whose power does not tell work and waiting apart",
)
ALLOCATION_ENERGY = Family(
    "gpu_allocation_energy_joules_total",
    "counter",
    "Energy of the holder's GPU or instance, in joules, by method: board (counter of a whole GPU), mig (estimate "
    "for an instance), busy_time (shared GPU: the energy at rest divided by the number of holders, the remainder by "
    "busy time)",
    ("method",),
)
ENERGY_METHODS, ENERGY_DIVIDED = {"none": "board", "mig": "mig"}, "busy_time"  # by Allocation.share
ALLOCATION_UTILIZATION = Family(
    "gpu_allocation_utilization_ratio",
    "gauge",
    "Utilization of the holder's GPU or instance. If it is shared, only by the holder's own processes, and absent "
    "while their utilization is unknown",
)
ALLOCATION_MEMORY = Family(
    "gpu_allocation_memory_used_bytes",
    "gauge",
    "Memory in use on the holder's GPU or instance, in bytes. If it is shared, only by the holder's own processes, "
    "and absent while any process there cannot be assigned",
)
ALLOCATION_PROCESSES = Family(
    "gpu_allocation_processes",
    "gauge",
    "Number of processes of the holder on its GPU or instance. Absent while any process there cannot be assigned",
)
ALLOCATION_POWER = Family(
    "gpu_allocation_power_watts",
    "gauge",
    "Power of the whole GPU, or estimate for the MIG instance, in watts. Absent where several holders share it",
)
ALLOCATION_TEMPERATURE = Family(
    "gpu_allocation_temperature_celsius",
    "gauge",
    "Temperature of the board, in degrees Celsius; a board has one sensor for all its instances. Absent where "
    "several holders share the GPU or instance",
)
ALLOCATION_HOST_ACTIVITY = Family(
    "gpu_allocation_host_activity_ratio",
    "gauge",
    "Share of its CPUs on this node that the whole holder used, mean of ten minutes, the same value on each of its "
    "GPUs. Its CPUs are those of its quota or cpuset, otherwise the host's CPUs in proportion to its part of the "
    "node's GPUs. Absent while unknown",
)
ALLOCATION_HOST_IO = Family(
    "gpu_allocation_host_io_bytes_per_second",
    "gauge",
    "Bytes per second that the whole holder read from and wrote to block devices of this node, mean of ten minutes, "
    "the same value on each of its GPUs. Network file systems are not included. Absent while unknown",
)
ALLOCATION_UNKNOWN = Family(
    "gpu_allocation_activity_unknown",
    "gauge",
    "Reason why gpu_allocation_idle_run_seconds is absent, always 1: either what keeps the holder from working (the "
    "state of its Slurm job, stopped, not_started, no_process), or why its activity is unknown (docs/concepts.md)",
    ("reason",),
)
ALLOCATION_STATE = Family(
    "gpu_allocation_state",
    "gauge",
    "Current state, always 1. For people and group_left, not for alerts over a range",
    ("state",),
)
ALLOCATION_CAUSE = Family(
    "gpu_allocation_cause",
    "gauge",
    "1 for each cause of the current state with medium or high confidence, at most two per allocation (docs/causes.md)",
    ("cause", "confidence"),
)
ALLOCATION_CAUSE_VALUE = Family(
    "gpu_allocation_cause_value",
    "gauge",
    "Numbers of these causes, at most three for each, in base units that the quantity names (docs/causes.md)",
    ("cause", "quantity"),
)
ALLOCATION_FAMILIES = (
    ALLOCATION_INFO,
    ALLOCATION_SHARE,
    ALLOCATION_HOLDER_UNITS,
    ALLOCATION_START,
    ALLOCATION_LAST_ACTIVE,
    ALLOCATION_IDLE_RUN,
    ALLOCATION_IDLE_WITNESSES,
    ALLOCATION_HELD,
    ALLOCATION_BUSY,
    ALLOCATION_OBSERVED,
    ALLOCATION_IDLE,
    ALLOCATION_LOW,
    ALLOCATION_HIGH,
    ALLOCATION_STALLED,
    ALLOCATION_STALLED_RUN,
    ALLOCATION_ENERGY,
    ALLOCATION_UTILIZATION,
    ALLOCATION_MEMORY,
    ALLOCATION_PROCESSES,
    ALLOCATION_POWER,
    ALLOCATION_TEMPERATURE,
    ALLOCATION_HOST_ACTIVITY,
    ALLOCATION_HOST_IO,
    ALLOCATION_STATE,
    ALLOCATION_CAUSE,
    ALLOCATION_CAUSE_VALUE,
    ALLOCATION_UNKNOWN,
)

BUILD_INFO = Family(
    "gpu_exporter_build_info", "gauge", "Version and backend of the exporter, always 1", ("version", "backend")
)
DRIVER_UP = Family(
    "gpu_driver_up",
    "gauge",
    "State of the driver: 1 while it answers, 0 while there is no driver or all of it hangs. 0 is a fault only if "
    "gpu_devices_expected is above 0",
)
DEVICES_VISIBLE = Family("gpu_devices_visible", "gauge", "Number of GPUs that answer")
DEVICES_EXPECTED = Family(
    "gpu_devices_expected",
    "gauge",
    "Number of GPUs that should answer: on the bus with the vendor's driver, in the driver's list, or seen here before",
)
DEVICES_UNATTRIBUTED = Family(
    "gpu_devices_unattributed",
    "gauge",
    "Number of GPUs and MIG instances that are neither known to be held nor known to be free. Absent without a "
    "source of holders",
)
DEVICES_UNMANAGED = Family(
    "gpu_devices_unmanaged",
    "gauge",
    "Number of GPUs on the bus with another kernel driver (vfio-pci, nouveau, none). The exporter does not read "
    "them, and they are not lost",
    ("driver",),
    source="/sys/bus/pci/devices",
)
SAMPLE_INTERVAL = Family(
    "gpu_exporter_sample_interval_seconds",
    "gauge",
    "Time after which values are renewed, in seconds: the larger of the sampling interval and --textfile.interval",
)
TENANT_LABELS = ("scheduler", "namespace", "account", "user")
TENANT_HELD = Family(
    "gpu_tenant_held_gpu_seconds_total",
    "counter",
    "GPU-seconds held on this node by a namespace, or by an account and user. Each GPU counts by the share held. "
    "Pods and jobs that start and end between two scrapes count too",
)
TENANT_KNOWN = Family(
    "gpu_tenant_known_gpu_seconds_total",
    "counter",
    "GPU-seconds held for which utilization is known. The remainder is unknown",
)
TENANT_BUSY = Family(
    "gpu_tenant_busy_gpu_seconds_total", "counter", "Integral of utilization over the GPU-seconds held"
)
TENANT_IDLE = Family(
    "gpu_tenant_idle_gpu_seconds_total",
    "counter",
    "GPU-seconds held with utilization exactly 0 and every other witness quiet",
)
TENANT_STALLED = Family(
    "gpu_tenant_stalled_gpu_seconds_total",
    "counter",
    "GPU-seconds held fully busy without a sign of progress. Neither busy nor idle",
)
TENANT_ENERGY = Family(
    "gpu_tenant_energy_joules_total",
    "counter",
    "Energy of GPUs and MIG instances while a tenant held them, in joules. For shared GPUs and instances, only the "
    "tenant's part",
)
TENANT_UNPROVEN = Family(
    "gpu_tenant_unproven_gpu_seconds_total",
    "counter",
    "GPU-seconds held with utilization 0 for which no second witness was read (gpu_idle_witnesses). Neither busy nor "
    "idle; absent without such time",
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
    "gauge",
    "Unix time at which a GPU last answered, kept while no GPU answers. Absent before the first answer",
)
STATE_LAST_WRITE = Family(
    "gpu_exporter_state_last_write_timestamp_seconds",
    "gauge",
    "Unix time of the last write of the state file. Published counters have the values of that time. Absent before "
    "the first write, and where no state is kept",
)
STATE_WRITE_ERRORS = Family(
    "gpu_exporter_state_write_errors_total",
    "counter",
    "Number of failed writes of the state file since the exporter started. Absent where no state is kept",
)
COLLECTOR_SUCCESS = Family(
    "gpu_exporter_collector_success",
    "gauge",
    "Result of the collector's last cycle: 1 without errors on any GPU, 0 otherwise. Missing data is not an error",
    ("collector",),
)
COLLECTOR_DURATION = Family(
    "gpu_exporter_collector_duration_seconds",
    "gauge",
    "Duration of the collector's last cycle, in seconds, the longest of all GPUs",
    ("collector",),
)
DRIVER_ERRORS = Family(
    "gpu_exporter_driver_errors_total",
    "counter",
    "Number of failed driver calls and discarded answers since the exporter started",
    ("call", "error"),
)
TASK_FAILURES = Family(
    "gpu_exporter_task_failures_total",
    "counter",
    "Number of internal errors since the exporter started, by the task in which they arose. The task lost one turn and "
    "went on. The log has the error",
    ("task",),
)
WEB_CONFIG_SUCCESS = Family(
    "gpu_exporter_web_config_success",
    "gauge",
    "State of --web.config.file: 1 if the port uses all of it, 0 if its last change was refused, or was applied except "
    "for a part that would open the port. Absent without the file",
)
ATTRIBUTION_UP = Family(
    "gpu_exporter_attribution_up",
    "gauge",
    "State of the source: 1 if it answered when it was last asked, 0 otherwise",
    ("source",),
)
ATTRIBUTION_COMPLETE = Family(
    "gpu_exporter_attribution_complete",
    "gauge",
    "Completeness of the source's answer: 1 if the source reports every holder, and every holder in it has its "
    "device, 0 otherwise",
    ("source",),
)
ATTRIBUTION_LAST_SUCCESS = Family(
    "gpu_exporter_attribution_last_success_timestamp_seconds",
    "gauge",
    "Unix time for which the source's last answer was true, as the source reports it. Absent before the first answer",
    ("source",),
)
JOBS_MISSED = Family(
    "gpu_exporter_jobs_missed_total",
    "counter",
    "Number of jobs that ended before the exporter knew which GPUs they held. No tenant has their hours",
    ("source",),
)
ATTRIBUTION_CONFLICTS = Family(
    "gpu_exporter_attribution_conflicts_total",
    "counter",
    "Number of polls in which the source contradicted a source of higher precedence, or in which the processes on a "
    "GPU contradicted the source",
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
    ATTRIBUTION_LAST_SUCCESS,
    JOBS_MISSED,
    ATTRIBUTION_CONFLICTS,
)


def fixed_groups() -> Iterator[tuple[str, tuple[str, ...], tuple[Family, ...]]]:
    """Yields title, labels and families of each group that no collector publishes, for docs/metrics.md."""
    yield (
        "GPU: identity and ledger",
        DEVICE_LABELS,
        (GPU_INFO, GPU_UP, GPU_ALLOCATED, GPU_ALLOCATABLE, *UNIT_FAMILIES, GPU_OTHER_ACTIVITY),
    )
    yield "GPU on the PCI bus that the driver does not list", (), (GPU_MISSING,)
    yield "GPU: collector `xid`, published for a lost GPU too", DEVICE_LABELS, XID_FAMILIES
    yield "MIG instance: ledger", MIG_LABELS, (*MIG_UNIT_FAMILIES, MIG_OTHER_ACTIVITY)
    yield "Allocation: one holder on one GPU or MIG instance", ALLOCATION_LABELS, ALLOCATION_FAMILIES
    yield "Training: what the job of an allocation reports of itself", ALLOCATION_LABELS, training.FAMILIES
    yield "Tenant: a namespace, or an account and user of Slurm", TENANT_LABELS, TENANT_FAMILIES
    yield "The exporter itself", (), SELF_FAMILIES
