"""Generated from defaults.yaml by tools/generate.py: do not edit.

Durations are seconds, ratios 0 to 1.
"""

from __future__ import annotations

from typing import NamedTuple


class Sampling(NamedTuple):
    """Keys of the section `sampling`."""

    interval: float = 1.0
    """seconds; NVML utilization covers 1/6 to 1 s (nvmlUtilization_t), a longer interval misses time; at least 200ms"""
    interval_max: float = 5.0
    """seconds; longest interval; used if the driver keeps all samples in between (rings of some 16 s, or sums)"""
    deadline: float = 2.0
    """seconds; a device cycle that takes longer counts as hung; healthy cycles take milliseconds"""
    withhold_after_intervals: int = 3
    """metric families of a device that are older than this many intervals are not published"""
    withhold_min: float = 15.0
    """seconds; metric families of a device are published at least up to this age: one common scrape interval"""


class Attribution(NamedTuple):
    """Keys of the section `attribution`."""

    interval: float = 5.0
    """seconds; time between polls of the kubelet and of Slurm's steps; the kubelet allows 100 requests/s in total"""
    slurm_interval: float = 60.0
    """seconds; time between two slurmctld requests of a node, unless a job starts or ends; spread by up to half"""
    slurm_pods: str = ""
    """pods that run slurmd, as NAMESPACE/POD with * and ?: they are Slurm nodes, not holders; e.g. slurm/*-worker-*"""
    timeout: float = 5.0
    """seconds; time limit for one poll of one source"""
    keep_last: float = 300.0
    """seconds; how long the last known mapping is kept while a source does not answer"""
    stale_after_polls: int = 3
    """a mapping older than this many polls still labels series, but no longer counts time for a holder"""
    empty_confirm: float = 5.0
    """seconds; an empty answer of the kubelet after a full one counts only if it is repeated this much later"""


class IdentityDefaults(NamedTuple):
    """Keys of the section `identity`."""

    user: str = "auto"
    """name, uid, hmac, none; auto is hmac if Slurm's PrivateData hides jobs or users, else name"""


class LedgerDefaults(NamedTuple):
    """Keys of the section `ledger`."""

    gap_intervals: int = 3
    """a gap longer than this many sampling intervals is unknown time"""
    low_ratio: float = 0.1
    """utilization below this is low: p5 in SageMaker Debugger's LowGPUUtilization rule"""
    high_ratio: float = 0.7
    """utilization above this is high: p95 in the same rule"""
    idle_run_unknown_reset: float = 60.0
    """seconds; more unknown time than this without a break ends an idle run"""
    idle_run_unknown_max_ratio: float = 0.1
    """a larger total share of unknown time ends an idle run too; 1 minus policy.coverage_min"""
    power_floor_max_ratio: float = 0.3
    """the learned idle power never exceeds this share of the limit (V100 context: 0.27)"""
    power_active_step: float = 0.25
    """power above this share of the range from floor to limit contradicts idleness"""
    gpm_idle_max_ratio: float = 0.001
    """GPM activity up to this ratio is not work: a context at rest has 0.00006 of graphics on an H200"""
    gpm_sm_idle_max_ratio: float = 1e-07
    """SM activity up to this ratio is not work: 0 at rest; a kernel of 25 us on all SMs of an H200 has 0.00002"""
    pcie_idle_max_bytes_per_second: int = 10000000
    """traffic of a GPU at rest, including monitoring: 2 to 7 MB/s on an H200 that is read every second"""
    nvlink_idle_max_bytes_per_second: int = 1000000
    """links at rest have almost no traffic; 0 on an H200"""


class State(NamedTuple):
    """Keys of the section `state`."""

    write_interval: float = 1.0
    """seconds; how often counters are written and published; a kill loses at most this much"""


class Diagnosis(NamedTuple):
    """Keys of the section `diagnosis`."""

    interval: float = 15.0
    """seconds; how often each allocation is judged"""
    hold: float = 300.0
    """seconds; a new state is published after it has lasted this long; unknown and work are published at once"""
    window: float = 600.0
    """seconds; the state of an allocation is judged over this window"""
    coverage_min: float = 0.8
    """below this share of known time the state is unknown"""
    low_mean: float = 0.5
    """a mean utilization at or below this is low (ICSE'24 study of underused jobs)"""
    throttled_share: float = 0.1
    """the state is throttled if thermal, brake or slowdown throttling lasts for this share of the window"""
    without: str = ""
    """causes that the exporter does not look for, e.g. interactive; stalls disables all detection of stalls"""


class Stalls(NamedTuple):
    """Keys of the section `stalls`."""

    after: float = 900.0
    """seconds; a run without progress of this length is a stall; longer than torch's own NCCL timeout of 10 min"""
    proven_after: float = 300.0
    """seconds; length of such a run if a gang member provably cannot continue; flat power takes 5 min to prove"""
    waits_min: int = 3
    """after this number of waits that ended by themselves, a stall must last longer (verifiers#182: waits of 25 min)"""
    wait_factor: int = 3
    """a stall must then last this many times the longest of the last 20 waits; rollouts hardly grow threefold"""
    wait_max: float = 43200.0
    """seconds; upper limit of the length that waits_min and wait_factor require"""


class Training(NamedTuple):
    """Keys of the section `training`."""

    files: str = "none"
    """read: reads the files in which jobs describe their training (docs/torch.md); they are the jobs' claims"""


class CausesDefaults(NamedTuple):
    """Keys of the section `causes`."""

    files: str = "none"
    """trace: also reads the open files and read calls of processes; needs the right to trace them (CAP_SYS_PTRACE)"""
    steps: str = "shown"
    """delay: delays a mark while a training reports steps on idle GPUs; these steps are only the job's claim"""
    start_max: float = 1800.0
    """seconds; a holder counts as starting for at most this time; the same as policy.startup_grace"""


class Policy(NamedTuple):
    """Keys of the section `policy`."""

    candidate_after: float = 3600.0
    """seconds; unbroken known idle time after which a holder is a candidate; Princeton warns at 60 min"""
    underused_after: float = 7200.0
    """seconds; known idle time after which a holder is underused; 18 % of such runs end within the hour (GenTD26)"""
    interactive_after: float = 14400.0
    """seconds; underused_after for notebooks and interactive jobs, because people think, and have lunch"""
    gap_max: float = 43200.0
    """seconds; underused_after is twice a holder's longest idle gap that ended with work, but at most this"""
    host_busy_ratio: float = 0.25
    """a holder that uses more of its CPUs than this (mean of 10 min) works, even if its GPUs do not"""
    host_busy_io: int = 20000000
    """a holder that moves more bytes per second than this to and from disks works too"""
    host_delay_max: float = 21600.0
    """seconds; a holder with such work remains a candidate until its GPUs were idle for this long; 0s: no delay"""
    idle_after_max: float = 43200.0
    """seconds; an owner's gpu-exporter.io/idle-after counts up to this duration"""
    waiting_max: float = 21600.0
    """seconds; idle time after which a gang that waits for members is reported as candidate"""
    exempt_max: float = 86400.0
    """seconds; how long an owner's gpu-exporter.io/exempt-until is valid after it was set"""
    startup_grace: float = 1800.0
    """seconds; an allocation younger than this is never judged: install, load, compile"""
    coverage_min: float = 0.9
    """share of the window that must be observed before a decision"""
    fresh_min: float = 120.0
    """seconds; evidence older than this (or four sampling intervals) is ignored"""
    unsupported_max: float = 600.0
    """seconds; a mark without supporting evidence for this long is withdrawn"""
    sharing_below: float = 0.2
    """a serving holder is a sharing-candidate if even its busiest hour is below this utilization"""
    sharing_window: float = 604800.0
    """seconds; window that is searched for the busiest hour; a younger holder is not judged"""
    new_marks_max: int = 20
    """marks set in one cycle; withdrawals have no such limit"""
    new_marks_namespace_max: int = 10
    """marks set in one cycle in one namespace, or in all namespaces of one tenant"""
    new_marks_hour_max: int = 200
    """marks set in an hour: an administrator who checks hourly can undo this many by hand"""
    freeze_share: float = 0.05
    """a burst: more than this share of the held GPUs became idle within 15 min; marks of its holders wait"""
    freeze_usual: int = 3
    """a burst as well: more than this many times the usual number at that hour (median of 7 days)"""
    freeze_max: float = 14400.0
    """seconds; longest delay after candidate_after, for the marks of holders that became idle in a burst"""
    serving_kinds: str = ""
    """further kinds of controllers whose pods are servers, e.g. example.com/ModelServer, Bot"""
    serving_labels: str = ""
    """labels that make a pod a server, e.g. example.com/role=server; anybody who makes pods can set them"""
    tenant_label: str = ""
    """label of a namespace that names its team or person; namespaces with one value are one tenant"""
    pause_when: str = ""
    """PromQL, e.g. probe_success{job="nfs"} == 0: while it has a result, nothing is marked"""
    system_namespaces: str = "kube-system"
    """no pod in these is marked, and their DaemonSets and critical pods are not counted as spared"""
    help_url: str = ""
    """the site's page for owners, in Events and as an annotation, e.g. https://docs.example.org/gpu"""


class Actions(NamedTuple):
    """Keys of the section `actions`."""

    mode: str = "none"
    """shadow: actions are only counted and logged; act: actions are carried out (docs/actions.md)"""
    kinds: str = ""
    """allowed actions: a list of suspend, deactivate, stop, requeue, cancel"""
    warned_for: float = 7200.0
    """seconds; how long the owner's alert must have been in Alertmanager, with a receiver and not silenced"""
    demand: str = "needed"
    """needed: acts only if more GPUs of that pool are waited for (15m) than were taken back; ignored: always"""
    cycle_max: int = 2
    """most actions in one cycle"""
    hour_max: int = 10
    """most actions in an hour, at most 16: few enough to undo by hand"""
    beside_cpu: float = 0.05
    """CPUs, by cAdvisor; a pod without GPUs is at rest only if it never used more in the idle time"""
    beside_io: int = 1000000
    """a pod without GPUs is at rest only if it never moved more bytes per second to and from disks"""
    grace_max: float = 600.0
    """seconds; longest terminationGracePeriodSeconds (Slurm: KillWait) of a pod or job that an action ends"""
    host_work_max: float = 0.0
    """seconds; idle time after which host activity, known or not, no longer prevents an action; 0s: no limit"""
    shadow_for: float = 1209600.0
    """seconds; a policy may act only if a reconciler has run for 90 % of this time, dry or not"""
    shadow_decisions: int = 50
    """required decisions of that policy and class in this time, from 3 tenants; a tenant counts for a fifth at most"""
    regret_max: float = 0.05
    """highest share of these decisions after which the holder worked again within the hour"""
    resumed_max: float = 0.2
    """highest share of the policy's actions that owners undid within a day"""
    override: str = ""
    """why the last four conditions do not apply here, and who decided that; written to the audit log"""


class Alerts(NamedTuple):
    """Keys of the section `alerts`."""

    selector: str = 'job="gpu-exporter"'
    """matchers of the exporter's series; also job=~"gpu-exporter|node" for textfiles"""
    reconciler: str = 'job="gpu-exporter-reconciler"'
    """matchers of the reconciler's series"""
    slurm_collector: str = 'job=~"gpu-exporter-(slurm-collector|reconciler)"'
    """matchers of the Slurm collector's series"""
    dcgm: str = 'job=~".*dcgm.*"'
    """matchers of dcgm-exporter's series, for alerts/rules/optional/source-dcgm.yaml"""
    dcgm_idle_max_ratio: float = 0.001
    """source-dcgm: engine activity up to this is noise, as with ledger.gpm_idle_max_ratio; gpu-pruner uses 0.01"""
    nvidia_smi: str = 'job=~".*nvidia.*"'
    """matchers of nvidia_gpu_exporter's series, for alerts/rules/optional/source-nvidia-smi.yaml"""
    source_window: float = 43200.0
    """seconds; source-dcgm cuts longer idle runs to this length; must be above idle_for"""
    grafana: str = ""
    """alerts link to the dashboard at this address, e.g. https://grafana.example.org"""
    exclude: str = ""
    """e.g. namespace!="ops", account!~"class-.*": matchers of the holders that are reported"""
    interval: float = 60.0
    """seconds; time between two evaluations of the rules"""
    owners_interval: float = 120.0
    """seconds; time between two evaluations of the owners' alerts, which cost the most and are the least urgent"""
    idle_for: float = 3600.0
    """seconds; idle run that is reported to the owner; the same as policy.candidate_after"""
    idle_short: float = 600.0
    """seconds; a GPU that was busy within this time counts as used; the same as diagnosis.window"""
    window: float = 1800.0
    """seconds; window of coverage and utilization; longer windows add up recordings of this one"""
    wait: float = 600.0
    """seconds; `for` of alerts; below 10m Prometheus does not restore it after a restart"""
    wait_long: float = 1800.0
    """seconds; `for` of alerts that are not urgent"""
    keep: float = 900.0
    """seconds; keep_firing_for: without it, a failed scrape resolves the alert and fires it again"""
    coverage_min: float = 0.9
    """observed share of the held time that an alert needs"""
    fresh_max: float = 300.0
    """seconds; data is ignored if the last sample is older than this"""
    low_over: float = 21600.0
    """seconds; GpuHolderLow: time over which the mean utilization is computed"""
    low_mean: float = 0.15
    """GpuHolderLow: the alert fires below this mean, if no GPU of the holder is idle"""
    throttled_share: float = 0.1
    """share of the window in which a GPU was slowed down; the same as diagnosis.throttled_share"""
    degraded_share: float = 0.02
    """the alert pages if more than this share of the cluster's GPUs does not answer"""
    demand_pod_max: int = 8
    """GPUs; for actions, one pending pod or job counts for at most this many: one node"""
    demand_tenant_max: int = 16
    """GPUs; one namespace or account counts for at most this many, so that one queue cannot empty a pool"""
    queued_share: float = 0.05
    """reported if more than this share of the cluster's GPUs is held idle while others wait"""
    team_label: str = "label_team"
    """label of kube_pod_labels with the team's name"""
    queue_label: str = "label_kueue_x_k8s_io_queue_name"
    """label of kube_pod_labels with the queue's name; this is Kueue's"""
    pod_labels: str = ""
    """up to three more labels of kube_pod_labels, e.g. label_project, label_cost_center"""
    resources: str = "nvidia_com_gpu(_.+)?|nvidia_com_mig_.+"
    """resources whose devices are GPUs, as kube-state-metrics writes their names"""
    pool_label: str = "label_node_pool"
    """label of kube_node_labels with the node pool's name, e.g. label_karpenter_sh_nodepool"""


class Settings(NamedTuple):
    """Every window and threshold."""

    sampling: Sampling = Sampling()
    attribution: Attribution = Attribution()
    identity: IdentityDefaults = IdentityDefaults()
    ledger: LedgerDefaults = LedgerDefaults()
    state: State = State()
    diagnosis: Diagnosis = Diagnosis()
    stalls: Stalls = Stalls()
    training: Training = Training()
    causes: CausesDefaults = CausesDefaults()
    policy: Policy = Policy()
    actions: Actions = Actions()
    alerts: Alerts = Alerts()


DURATIONS = frozenset(
    (
        "actions.grace_max",
        "actions.host_work_max",
        "actions.shadow_for",
        "actions.warned_for",
        "alerts.fresh_max",
        "alerts.idle_for",
        "alerts.idle_short",
        "alerts.interval",
        "alerts.keep",
        "alerts.low_over",
        "alerts.owners_interval",
        "alerts.source_window",
        "alerts.wait",
        "alerts.wait_long",
        "alerts.window",
        "attribution.empty_confirm",
        "attribution.interval",
        "attribution.keep_last",
        "attribution.slurm_interval",
        "attribution.timeout",
        "causes.start_max",
        "diagnosis.hold",
        "diagnosis.interval",
        "diagnosis.window",
        "ledger.idle_run_unknown_reset",
        "policy.candidate_after",
        "policy.exempt_max",
        "policy.freeze_max",
        "policy.fresh_min",
        "policy.gap_max",
        "policy.host_delay_max",
        "policy.idle_after_max",
        "policy.interactive_after",
        "policy.sharing_window",
        "policy.startup_grace",
        "policy.underused_after",
        "policy.unsupported_max",
        "policy.waiting_max",
        "sampling.deadline",
        "sampling.interval",
        "sampling.interval_max",
        "sampling.withhold_min",
        "stalls.after",
        "stalls.proven_after",
        "stalls.wait_max",
        "state.write_interval",
    )
)
"""Keys that are written with a unit, e.g. 90s."""
