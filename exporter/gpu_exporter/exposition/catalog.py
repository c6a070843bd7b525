"""Families that are not a collector's: ledger, allocations, the exporter itself. And the list for the reference."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_exporter.model.holders import ALLOCATION_KEY
from gpu_exporter.model.metrics import Family

DEVICE_LABELS = ("gpu", "uuid")
MIG_LABELS = ("gpu", "uuid", "mig", "mig_uuid")
ALLOCATION_LABELS = ("gpu", "uuid", "mig", "mig_uuid", *ALLOCATION_KEY[2:])  # gpu and mig are for people

GPU_INFO = Family(
    "gpu_info",
    "gauge",
    "Identity of a GPU, always 1",
    ("name", "driver_version", "pci_bus_id", "minor", "mig_mode"),
)
GPU_UP = Family(
    "gpu_up",
    "gauge",
    "1 while the GPU answers, 0 while it is lost, missing or its calls hang; absent while it is away on purpose",
)
GPU_MISSING = Family(
    "gpu_missing",
    "gauge",
    "A GPU on the PCI bus that should answer and that the driver does not list, always 1; it has no UUID yet, one that "
    "was seen before has gpu_up 0",
    ("pci_bus_id",),
    source="/sys/bus/pci/devices",
)
GPU_ALLOCATED = Family(
    "gpu_allocated",
    "gauge",
    "1 while the GPU or an instance of it is held, 0 while it is free; absent while holders are not known, while a "
    "pod, job or container uses it that does not hold it, and while no pod holds it and the kubelet does not offer it",
)
GPU_ALLOCATABLE = Family(
    "gpu_allocatable",
    "gauge",
    "1 while the kubelet offers the GPU or an instance of it to pods, held or not; 0 while it does not: the device "
    "plugin is down, excludes it or reports it unhealthy; absent where that is not known, as with Slurm and resource "
    "claims",
    source="PodResources GetAllocatableResources",
)
GPU_BUSY = Family(
    "gpu_busy_seconds_total",
    "counter",
    "Integral of utilization; rate(busy)/rate(observed) is the mean over any window",
    source="nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates",
)
GPU_OBSERVED = Family(
    "gpu_observed_seconds_total",
    "counter",
    "Time for which utilization is known; its rate is the coverage",
)
GPU_IDLE = Family("gpu_idle_seconds_total", "counter", "Time at exactly 0 with every other readable witness quiet")
GPU_IDLE_WITNESSES = Family(
    "gpu_idle_witnesses",
    "gauge",
    "Witnesses of idleness that could be read: utilization, engines, GPM, PCIe, NVLink, power",
)
GPU_LAST_ACTIVE = Family(
    "gpu_last_active_timestamp_seconds",
    "gauge",
    "Last time any activity was seen; absent while none was",
)
_OTHER_ACTIVITY = (
    "Time at utilization 0 that is not idle, by the witness that was active, since the exporter started: of "
    "several the first in the order of docs/concepts.md; no series before its first activity"
)
GPU_OTHER_ACTIVITY = Family("gpu_other_activity_seconds_total", "counter", _OTHER_ACTIVITY, ("witness",))
MIG_OTHER_ACTIVITY = Family(
    "gpu_mig_other_activity_seconds_total", "counter", _OTHER_ACTIVITY, ("witness",), source="GPM"
)
GPU_UNATTRIBUTED_BUSY = Family(
    "gpu_unattributed_busy_seconds_total",
    "counter",
    "Integral of utilization that belongs to no known holder: nobody held it, or several did and it was none of "
    "theirs; with the busy time of the holders it makes gpu_busy_seconds_total, some seconds later",
)
GPU_UNATTRIBUTED_ENERGY = Family(
    "gpu_unattributed_energy_joules_total",
    "counter",
    "Energy that belongs to no known holder, since the exporter first saw it",
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
    "XIDs since the exporter started, by class (application, hardware, information); exported as 0 before the first "
    "event, so that increase() sees it",
    ("class",),
    source="nvmlEventSetWait_v2, with --collector.xid.kmsg /dev/kmsg too",
)
GPU_XID_ERRORS = Family(
    "gpu_xid_errors_total",
    "counter",
    "XIDs since the exporter started, by code",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
GPU_XID_LAST = Family(
    "gpu_xid_last_timestamp_seconds",
    "gauge",
    "When this XID was last reported",
    ("xid", "class"),
    source="nvmlEventSetWait_v2",
)
XID_FAMILIES = (GPU_XID_EVENTS, GPU_XID_ERRORS, GPU_XID_LAST)

ALLOCATION_INFO = Family(
    "gpu_allocation_info",
    "gauge",
    "Who holds the GPU or MIG instance, always 1",
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
    "gpu_allocation_share_ratio", "gauge", "Share of the GPU: 1 whole, slices for MIG, 1/holders when shared"
)
ALLOCATION_HOLDER_UNITS = Family(
    "gpu_allocation_holder_units",
    "gauge",
    "GPUs and MIG instances that the holder (pod or job) holds in all, on every node, as its scheduler counts them",
)
ALLOCATION_START = Family(
    "gpu_allocation_start_timestamp_seconds", "gauge", "Start as the scheduler reports it, else when first seen"
)
ALLOCATION_LAST_ACTIVE = Family(
    "gpu_allocation_last_active_timestamp_seconds",
    "gauge",
    "Last activity of this holder, its start until there was any; absent where activity has no source",
)
ALLOCATION_IDLE_RUN = Family(
    "gpu_allocation_idle_run_seconds",
    "gauge",
    "Present unbroken run of known zero; unknown time does not add, activity or too much unknown time (a minute in "
    "sequence, a tenth in all) resets it; absent while the GPU does not answer or its holder cannot work",
)
ALLOCATION_IDLE_WITNESSES = Family(
    "gpu_allocation_idle_run_witnesses",
    "gauge",
    "Fewest witnesses of idleness that any part of the present idle run rests on, 0 while there is no run",
)
ALLOCATION_LONGEST_GAP = Family(
    "gpu_allocation_idle_gap_longest_seconds",
    "gauge",
    "Longest idle run of this holder that ended with work; absent before there was one",
)
ALLOCATION_HELD = Family("gpu_allocation_held_seconds_total", "counter", "Time held since first seen")
ALLOCATION_BUSY = Family(
    "gpu_allocation_busy_seconds_total",
    "counter",
    "Integral of utilization while held; of a shared GPU of its own part",
)
ALLOCATION_OBSERVED = Family(
    "gpu_allocation_observed_seconds_total", "counter", "Time held for which utilization is known"
)
ALLOCATION_IDLE = Family(
    "gpu_allocation_idle_seconds_total", "counter", "Time held at exactly 0 with every other witness quiet"
)
ALLOCATION_LOW = Family(
    "gpu_allocation_low_seconds_total", "counter", "Time held below ledger.low_ratio (default 0.10)"
)
ALLOCATION_HIGH = Family(
    "gpu_allocation_high_seconds_total", "counter", "Time held at or above ledger.high_ratio (default 0.70)"
)
ALLOCATION_ENERGY = Family(
    "gpu_allocation_energy_joules_total",
    "counter",
    "Energy of what the holder holds, by method: board (a whole GPU's counter), mig (the instance's estimate), "
    "busy_time (a shared GPU: what it draws at rest by the number of holders, the rest by busy time)",
    ("method",),
)
ENERGY_METHODS, ENERGY_DIVIDED = {"none": "board", "mig": "mig"}, "busy_time"  # by Allocation.share
ALLOCATION_UTILIZATION = Family(
    "gpu_allocation_utilization_ratio",
    "gauge",
    "Utilization of the holder's GPU or instance; where that is shared, by the holder's own processes, and absent "
    "while that is not known",
)
ALLOCATION_MEMORY = Family(
    "gpu_allocation_memory_used_bytes",
    "gauge",
    "Memory used on the holder's GPU or instance; where that is shared, by the holder's own processes, and absent "
    "while not each process there is known to be one holder's",
)
ALLOCATION_PROCESSES = Family(
    "gpu_allocation_processes",
    "gauge",
    "Processes of the holder on its GPU or instance; absent while not each process there is known to be one holder's",
)
ALLOCATION_POWER = Family("gpu_allocation_power_watts", "gauge", "Power of the whole GPU that the holder holds alone")
ALLOCATION_TEMPERATURE = Family(
    "gpu_allocation_temperature_celsius",
    "gauge",
    "Temperature of the board, its one sensor for all instances",
)
ALLOCATION_HOST_ACTIVITY = Family(
    "gpu_allocation_host_activity_ratio",
    "gauge",
    "Share of its CPUs on this node that the whole holder used, mean of ten minutes, the same on each of its GPUs; its "
    "CPUs are those of its quota or cpuset, else the host's by its part of the node's GPUs",
)
ALLOCATION_HOST_IO = Family(
    "gpu_allocation_host_io_bytes_per_second",
    "gauge",
    "Bytes that the whole holder read from and wrote to block devices of this node, mean of ten minutes, the same on "
    "each of its GPUs; network file systems are not in it",
)
ALLOCATION_UNKNOWN = Family(
    "gpu_allocation_activity_unknown",
    "gauge",
    "1 while gpu_allocation_idle_run_seconds is absent, by reason: what keeps the holder from working (the state of "
    "its Slurm job, stopped, not_started, no_process), or why its activity is not known (docs/concepts.md)",
    ("reason",),
)
ALLOCATION_STATE = Family(
    "gpu_allocation_state",
    "gauge",
    "Present state, always 1; for people and group_left, not for alerts over a range",
    ("state",),
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
    ALLOCATION_ENERGY,
    ALLOCATION_UTILIZATION,
    ALLOCATION_MEMORY,
    ALLOCATION_PROCESSES,
    ALLOCATION_POWER,
    ALLOCATION_TEMPERATURE,
    ALLOCATION_HOST_ACTIVITY,
    ALLOCATION_HOST_IO,
    ALLOCATION_STATE,
    ALLOCATION_UNKNOWN,
)

BUILD_INFO = Family("gpu_exporter_build_info", "gauge", "Version and backend, always 1", ("version", "backend"))
DRIVER_UP = Family(
    "gpu_driver_up",
    "gauge",
    "1 while the driver answers, 0 while there is none or all of it hangs; a fault only where gpu_devices_expected is "
    "above 0",
)
DEVICES_VISIBLE = Family("gpu_devices_visible", "gauge", "GPUs that answer")
DEVICES_EXPECTED = Family(
    "gpu_devices_expected",
    "gauge",
    "GPUs that should answer: on the bus with NVIDIA's driver, in the driver's list, or seen here before",
)
DEVICES_UNATTRIBUTED = Family(
    "gpu_devices_unattributed",
    "gauge",
    "GPUs and MIG instances of which it is not known who holds them, nor that they are free; absent without a source",
)
DEVICES_UNMANAGED = Family(
    "gpu_devices_unmanaged",
    "gauge",
    "GPUs on the bus that another kernel driver has (vfio-pci, nouveau, none): not ours to read, and not lost",
    ("driver",),
    source="/sys/bus/pci/devices",
)
SAMPLE_INTERVAL = Family(
    "gpu_exporter_sample_interval_seconds",
    "gauge",
    "How fresh values can be: the larger of the sampling interval and --textfile.interval",
)
TENANT_LABELS = ("scheduler", "namespace", "account", "user")
TENANT_HELD = Family(
    "gpu_tenant_held_gpu_seconds_total",
    "counter",
    "GPU-seconds held on this node by a namespace, or an account and user, each GPU by the share held; pods and jobs "
    "that come and go between two scrapes count too",
)
TENANT_KNOWN = Family(
    "gpu_tenant_known_gpu_seconds_total",
    "counter",
    "GPU-seconds held for which utilization is known; the rest is unknown",
)
TENANT_BUSY = Family(
    "gpu_tenant_busy_gpu_seconds_total", "counter", "Integral of utilization over the GPU-seconds held"
)
TENANT_IDLE = Family(
    "gpu_tenant_idle_gpu_seconds_total", "counter", "GPU-seconds held at exactly 0 with every other witness quiet"
)
TENANT_ENERGY = Family(
    "gpu_tenant_energy_joules_total",
    "counter",
    "Energy of GPUs and MIG instances while a tenant held them, and of its part of shared ones",
)
TENANT_FAMILIES = (TENANT_HELD, TENANT_KNOWN, TENANT_BUSY, TENANT_IDLE, TENANT_ENERGY)
LAST_SAMPLE = Family(
    "gpu_exporter_last_sample_timestamp_seconds",
    "gauge",
    "When a GPU last answered, kept while none does; absent before the first time",
)
STATE_LAST_WRITE = Family(
    "gpu_exporter_state_last_write_timestamp_seconds",
    "gauge",
    "When the state file was last written; published counters have the values of that time",
)
STATE_WRITE_ERRORS = Family(
    "gpu_exporter_state_write_errors_total",
    "counter",
    "Failed writes of the state file since start; absent where no state is kept",
)
COLLECTOR_SUCCESS = Family(
    "gpu_exporter_collector_success",
    "gauge",
    "1 when the collector's last cycle had no error on any GPU; no data is no error",
    ("collector",),
)
COLLECTOR_DURATION = Family(
    "gpu_exporter_collector_duration_seconds",
    "gauge",
    "Longest last cycle of the collector over the GPUs",
    ("collector",),
)
DRIVER_ERRORS = Family(
    "gpu_exporter_driver_errors_total",
    "counter",
    "Failed driver calls and answers that were not believed, since start",
    ("call", "error"),
)
ATTRIBUTION_UP = Family(
    "gpu_exporter_attribution_up", "gauge", "1 when the source answered when it was last asked", ("source",)
)
ATTRIBUTION_COMPLETE = Family(
    "gpu_exporter_attribution_complete",
    "gauge",
    "1 when each holder that the source names has its device, and none may be left out; 0 while it answers in part",
    ("source",),
)
ATTRIBUTION_LAST_SUCCESS = Family(
    "gpu_exporter_attribution_last_success_timestamp_seconds",
    "gauge",
    "When what the source says was last true by its own word; absent before the first time",
    ("source",),
)
JOBS_MISSED = Family(
    "gpu_exporter_jobs_missed_total",
    "counter",
    "Jobs that ended before it was known which GPUs they held, so that no tenant has their hours",
    ("source",),
)
ATTRIBUTION_CONFLICTS = Family(
    "gpu_exporter_attribution_conflicts_total",
    "counter",
    "Polls in which the source contradicted one of higher precedence, or the processes on a GPU contradicted it",
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
    ATTRIBUTION_UP,
    ATTRIBUTION_COMPLETE,
    ATTRIBUTION_LAST_SUCCESS,
    JOBS_MISSED,
    ATTRIBUTION_CONFLICTS,
)


def fixed_groups() -> Iterator[tuple[str, tuple[str, ...], tuple[Family, ...]]]:
    """Title, implied labels and families of everything that is not a collector's."""
    yield (
        "GPU: identity and ledger",
        DEVICE_LABELS,
        (GPU_INFO, GPU_UP, GPU_ALLOCATED, GPU_ALLOCATABLE, *UNIT_FAMILIES, GPU_OTHER_ACTIVITY),
    )
    yield "GPU on the PCI bus that the driver does not list", (), (GPU_MISSING,)
    yield "GPU: collector `xid`, published for a lost GPU too", DEVICE_LABELS, XID_FAMILIES
    yield "MIG instance: ledger", MIG_LABELS, (*MIG_UNIT_FAMILIES, MIG_OTHER_ACTIVITY)
    yield "Allocation: one holder on one GPU or MIG instance", ALLOCATION_LABELS, ALLOCATION_FAMILIES
    yield "Tenant: a namespace, or an account and user of Slurm", TENANT_LABELS, TENANT_FAMILIES
    yield "The exporter itself", (), SELF_FAMILIES
