"""Generated from defaults.yaml, which has the reason of each value, by tools/generate.py: do not edit."""

from typing import Annotated, NamedTuple, TypeAlias

Seconds: TypeAlias = Annotated[float, "written with a unit, e.g. 90s"]


class Sampling(NamedTuple):
    interval: Seconds = 1.0
    interval_max: Seconds = 5.0
    deadline: Seconds = 2.0
    withhold_after_intervals: int = 3
    withhold_min: Seconds = 15.0


class Attribution(NamedTuple):
    interval: Seconds = 5.0
    slurm_interval: Seconds = 60.0
    slurm_pods: str = ""
    timeout: Seconds = 5.0
    keep_last: Seconds = 300.0
    stale_after_polls: int = 3
    empty_confirm: Seconds = 5.0


class IdentityDefaults(NamedTuple):
    user: str = "auto"


class LedgerDefaults(NamedTuple):
    gap_intervals: int = 3
    low_ratio: float = 0.1
    high_ratio: float = 0.7
    idle_run_unknown_reset: Seconds = 60.0
    idle_run_unknown_max_ratio: float = 0.1
    power_floor_max_ratio: float = 0.3
    power_active_step: float = 0.25
    gpm_idle_max_ratio: float = 0.001
    gpm_sm_idle_max_ratio: float = 1e-07
    pcie_idle_max_bytes_per_second: int = 10000000
    nvlink_idle_max_bytes_per_second: int = 1000000


class State(NamedTuple):
    write_interval: Seconds = 1.0


class Diagnosis(NamedTuple):
    interval: Seconds = 15.0
    hold: Seconds = 300.0
    window: Seconds = 600.0
    coverage_min: float = 0.8
    low_mean: float = 0.5
    throttled_share: float = 0.1
    without: str = ""


class Stalls(NamedTuple):
    after: Seconds = 900.0
    proven_after: Seconds = 300.0
    waits_min: int = 3
    wait_factor: int = 3
    wait_max: Seconds = 43200.0


class Training(NamedTuple):
    files: str = "none"


class CausesDefaults(NamedTuple):
    files: str = "none"
    steps: str = "shown"
    start_max: Seconds = 1800.0


class Policy(NamedTuple):
    candidate_after: Seconds = 3600.0
    underused_after: Seconds = 7200.0
    interactive_after: Seconds = 14400.0
    gap_max: Seconds = 43200.0
    host_busy_ratio: float = 0.25
    host_busy_io: int = 20000000
    host_delay_max: Seconds = 21600.0
    idle_after_max: Seconds = 43200.0
    waiting_max: Seconds = 21600.0
    exempt_max: Seconds = 86400.0
    startup_grace: Seconds = 1800.0
    coverage_min: float = 0.9
    fresh_min: Seconds = 120.0
    unsupported_max: Seconds = 600.0
    sharing_below: float = 0.2
    sharing_window: Seconds = 604800.0
    new_marks_max: int = 20
    new_marks_namespace_max: int = 10
    new_marks_hour_max: int = 200
    freeze_share: float = 0.05
    freeze_usual: int = 3
    freeze_max: Seconds = 14400.0
    serving_kinds: str = ""
    serving_labels: str = ""
    tenant_label: str = ""
    pause_when: str = ""
    system_namespaces: str = "kube-system"
    help_url: str = ""


class Actions(NamedTuple):
    mode: str = "none"
    kinds: str = ""
    warned_for: Seconds = 7200.0
    demand: str = "needed"
    cycle_max: int = 2
    hour_max: int = 10
    beside_cpu: float = 0.05
    beside_io: int = 1000000
    grace_max: Seconds = 600.0
    host_work_max: Seconds = 0.0
    shadow_for: Seconds = 1209600.0
    shadow_decisions: int = 50
    regret_max: float = 0.05
    resumed_max: float = 0.2
    override: str = ""


class Alerts(NamedTuple):
    selector: str = 'job="gpu-exporter"'
    reconciler: str = 'job="gpu-exporter-reconciler"'
    slurm_collector: str = 'job=~"gpu-exporter-(slurm-collector|reconciler)"'
    dcgm: str = 'job=~".*dcgm.*"'
    dcgm_idle_max_ratio: float = 0.001
    nvidia_smi: str = 'job=~".*nvidia.*"'
    source_window: Seconds = 43200.0
    grafana: str = ""
    exclude: str = ""
    interval: Seconds = 60.0
    owners_interval: Seconds = 120.0
    idle_for: Seconds = 3600.0
    idle_short: Seconds = 600.0
    window: Seconds = 1800.0
    wait: Seconds = 600.0
    wait_long: Seconds = 1800.0
    keep: Seconds = 900.0
    coverage_min: float = 0.9
    fresh_max: Seconds = 300.0
    low_over: Seconds = 21600.0
    low_mean: float = 0.15
    throttled_share: float = 0.1
    degraded_share: float = 0.02
    demand_pod_max: int = 8
    demand_tenant_max: int = 16
    queued_share: float = 0.05
    team_label: str = "label_team"
    queue_label: str = "label_kueue_x_k8s_io_queue_name"
    pod_labels: str = ""
    resources: str = "nvidia_com_gpu(_.+)?|nvidia_com_mig_.+"
    pool_label: str = "label_node_pool"


class Settings(NamedTuple):
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
    f"{section}.{key}"
    for section, values in Settings()._asdict().items()
    for key, kind in type(values).__annotations__.items()
    if kind is Seconds
)
