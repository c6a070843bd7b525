"""The PromQL of the dashboard: what counts as held, used, idle and unknown, in one place.

Held = used + idle + unknown, at every moment. Whoever is not proven to be used or idle is unknown: the state says so,
or the GPU does not answer, or its last sample is too old to be believed (a textfile that a dead job left behind).
A count is 0 only where somebody vouches for it (`or 0 * ...` of a series that is there), never by `or vector(0)`.
MIG instances and shared GPUs count by their share, so that the parts add up to whole GPUs.
"""

from __future__ import annotations

from alerts.parameters import HOLDER, TARGET
from alerts.parameters import KEY as ALLOCATION

from gpu_exporter.defaults import Settings
from gpu_exporter.digest import oversized
from gpu_exporter.durations import format_duration

ON_NODES = 'node=~"$node"'
HELD = f'{ON_NODES}, namespace=~"$namespace"'  # a Slurm job has no namespace, which `.*` matches
IDLE_STATES = "held_idle|held_no_process"
SECONDS_PER_HOUR = 3600
KEY = f"{ALLOCATION}, gpu, mig"  # indexes are for people


class Queries:
    """Expressions with the windows of one `Settings`."""

    def __init__(self, settings: Settings) -> None:
        self.idle_for = format_duration(settings.policy.candidate_after)
        self.state_window = format_duration(settings.diagnosis.window)
        state_window_s = f"{settings.diagnosis.window:g}"
        fresh = (
            f"time() - min by ({TARGET}) (gpu_exporter_last_sample_timestamp_seconds{{{ON_NODES}}})"
            f" < clamp_min(4 * min by ({TARGET}) (gpu_exporter_sample_interval_seconds{{{ON_NODES}}}),"
            f" {settings.alerts.fresh_max:g})"
        )
        self._fresh = f"on ({TARGET}) ({fresh})"
        answering = f"min by ({TARGET}, uuid) (gpu_up{{{ON_NODES}}}) == 1 and {self._fresh}"
        self._answering = f"on ({TARGET}, uuid) ({answering})"
        known = f"{_state('!=', 'unknown')} and {self._answering}"
        self._known = f"on ({KEY}) ({known})"
        idle_run = f"min by ({KEY}) (gpu_allocation_idle_run_seconds{{{HELD}}})"
        used = f"{_state('!~', f'unknown|{IDLE_STATES}')} and {self._answering}"
        idle = f"{_state('=~', IDLE_STATES)} and {self._answering}"
        long_idle = f"({idle}) and on ({KEY}) ({idle_run} >= {settings.policy.candidate_after:g})"

        share = f"max by ({KEY}) (gpu_allocation_share_ratio{{{HELD}}})"
        # Published only while every source of holders answers: then no allocation means that nothing is held.
        nobody = f"0 * count(gpu_allocated{{{ON_NODES}}})"
        self.held = f"sum({share}) or {nobody}"
        self.used = f"sum({share} and on ({KEY}) ({used})) or {nobody}"
        self.idle_long = f"sum({share} and on ({KEY}) ({long_idle})) or {nobody}"
        self.idle_short = f"sum({share} and on ({KEY}) (({idle}) unless on ({KEY}) ({long_idle}))) or {nobody}"
        self.unknown = f"sum({share} unless {self._known}) or {nobody}"

        ever = f"max by (uuid) (last_over_time(gpu_up{{{ON_NODES}}}[{self.idle_for}]))"
        holder_known = (
            f"min by ({TARGET}, uuid) (gpu_allocated{{{ON_NODES}}})"
            f" or max by ({TARGET}, uuid) (gpu_allocation_share_ratio{{{ON_NODES}}})"
        )
        self.total = f"count({ever})"
        self.no_data = (
            f"count({ever} unless on (uuid) ({answering} and on ({TARGET}, uuid) ({holder_known}))) or 0 * {self.total}"
        )

        # Nothing held is believed only where gpu_allocated says so; no `or 0`: without data it is unknown.
        told = f"{answering} and on ({TARGET}, uuid) gpu_allocated{{{ON_NODES}}}"
        shares = f"sum by ({TARGET}, uuid) (max by ({KEY}) (gpu_allocation_share_ratio{{{ON_NODES}}}))"
        self.free = f"sum(clamp_min(1 - (({shares} and on ({TARGET}, uuid) ({told})) or 0 * ({told})), 0))"

        start = f"max by ({KEY}) (gpu_allocation_start_timestamp_seconds{{{HELD}}})"
        self.holders = _name_holder(
            f"{start} * 1000"  # Grafana's dates are milliseconds
            f" * on ({KEY}) group_left (user, account)"
            f" topk by ({KEY}) (1, max by ({KEY}, user, account) (gpu_allocation_info{{{HELD}}}))"
            f" * on ({KEY}) group_left (state) topk by ({KEY}) (1, {self._published_state()})"
            f" * on (uuid) group_left (name) topk by (uuid) (1, max by (uuid, name) (gpu_info{{{ON_NODES}}}))"
        )
        # Of the present holder only: a window that began before it would count its predecessor's work.
        self.utilization = (
            f"sum by ({KEY}) (increase(gpu_allocation_busy_seconds_total{{{HELD}}}[{self.state_window}]))"
            f" / (sum by ({KEY}) (increase(gpu_allocation_observed_seconds_total{{{HELD}}}[{self.state_window}])) > 0)"
            f" and {self._known} and on ({KEY}) (time() - {start} > {state_window_s})"
        )
        self.idle_run = f"{idle_run} and {self._known}"

        self.held_hours = _hours("gpu_allocation_held_seconds_total")
        self.idle_hours = _hours("gpu_allocation_idle_seconds_total")
        observed_hours = _hours("gpu_allocation_observed_seconds_total")
        # A holder without any source of activity has no observed seconds at all: all its time is unknown. And two
        # extrapolations may differ by a little, hence the clamp.
        self.unknown_hours = f"clamp_min({self.held_hours} - ({observed_hours} or 0 * {self.held_hours}), 0)"
        self.idle_share = f"{self.idle_hours} / ({observed_hours} > 0)"

        # By the names of the panel's columns; the same question as the digest's. Each answer has those alone of which
        # all is true, since a table shows what is in any of them.
        asked = dict(oversized.queries(HOLDER, "user, account", "$__range", HELD))
        small = (
            f"({asked['over_mean']} and on ({HOLDER}) {asked['over_peak']} and on ({HOLDER}) ({asked['over_model']}))"
        )
        self.oversized = {
            name.removeprefix("over_"): _name_pod(f"{expression} and on ({HOLDER}) {small}")
            for name, expression in asked.items()
        }

        self.power = f"sum by (node) (max by ({TARGET}, uuid) (gpu_power_watts{{{ON_NODES}}}) and {self._fresh})"
        self.node_utilization = _node_mean("gpu")
        self.instance_utilization = _node_mean("gpu_mig")

        reporting = f"max by ({TARGET}) (gpu_exporter_build_info{{{ON_NODES}}})"
        lately = f"max by ({TARGET}) (last_over_time(gpu_exporter_build_info{{{ON_NODES}}}[{self.idle_for}]))"
        self.exporters = f"count({reporting})"
        self.exporters_silent = f"count({lately} unless on ({TARGET}) {reporting}) or 0 * count({lately})"
        # GPUs that no kernel driver has, with none of NVIDIA's beside them: its driver failed to load.
        missed = f'gpu_devices_expected{{{ON_NODES}}} > 0 or gpu_devices_unmanaged{{{ON_NODES}, driver="none"}} > 0'
        driver = f"gpu_driver_up{{{ON_NODES}}}"
        self.driver_down = f"count({driver} == 0 and on ({TARGET}) ({missed})) or 0 * count({driver})"
        self.sources_down = _count_zeros("gpu_exporter_attribution_up")
        self.sample_age = (
            f"max by (node) (timestamp(gpu_exporter_last_sample_timestamp_seconds{{{ON_NODES}}})"
            f" - gpu_exporter_last_sample_timestamp_seconds{{{ON_NODES}}})"
        )
        held_rate = f"sum by (node) (rate(gpu_allocation_held_seconds_total{{{HELD}}}[$__rate_interval]))"
        observed_rate = f"sum by (node) (rate(gpu_allocation_observed_seconds_total{{{HELD}}}[$__rate_interval]))"
        self.coverage = f"clamp_max(({observed_rate} or 0 * {held_rate}) / ({held_rate} > 0), 1)"

    def _published_state(self) -> str:
        """The exporter's state, but unknown where the GPU does not answer or the sample is old."""
        state = f"gpu_allocation_state{{{HELD}}}"
        unknown = f'label_replace({state} unless {self._answering}, "state", "unknown", "state", ".*")'
        return f"max by ({KEY}, state) (({state} and {self._answering}) or {unknown})"


def _state(operator: str, states: str) -> str:
    return f'max by ({KEY}) (gpu_allocation_state{{{HELD}, state{operator}"{states}"}})'


def _name_holder(expression: str) -> str:
    """A label `holder` as people write it: namespace/pod/container or `job 42`."""
    joined = f'label_join({expression}, "holder", "/", "namespace", "pod", "container")'
    return f'label_replace({joined}, "holder", "job $1", "job_id", "(.+)")'


def _name_pod(expression: str) -> str:
    """A label `holder` without the container: namespace/pod or `job 42`."""
    joined = f'label_join({expression}, "holder", "/", "namespace", "pod")'
    return f'label_replace({joined}, "holder", "job $1", "job_id", "(.+)")'


def _hours(counter: str) -> str:
    """GPU-hours of the dashboard's range by namespace or Slurm account.

    Holders that are gone by now count too, so share and account are what they were within the range.
    """
    seconds = f"max by ({KEY}) (increase({counter}{{{HELD}}}[$__range]))"
    share = f"max by ({KEY}) (avg_over_time(gpu_allocation_share_ratio{{{HELD}}}[$__range]))"
    account = f"max by ({KEY}, account) (last_over_time(gpu_allocation_info{{{HELD}}}[$__range]))"
    weighted = f"{seconds} * on ({KEY}) {share} * on ({KEY}) group_left (account) topk by ({KEY}) (1, {account})"
    tenant = f'label_replace({weighted}, "tenant", "Slurm, no account", "job_id", ".+")'
    tenant = f'label_replace({tenant}, "tenant", "account $1", "account", "(.+)")'
    tenant = f'label_replace({tenant}, "tenant", "namespace $1", "namespace", "(.+)")'
    return f"sum by (tenant) ({tenant}) / {SECONDS_PER_HOUR}"


def _node_mean(prefix: str) -> str:
    busy, observed = (
        f"sum by (node) (rate({prefix}_{name}_seconds_total{{{ON_NODES}}}[$__rate_interval]))"
        for name in ("busy", "observed")
    )
    return f"{busy} / ({observed} > 0)"


def _count_zeros(gauge: str) -> str:
    series = f"{gauge}{{{ON_NODES}}}"
    return f"count({series} == 0) or 0 * count({series})"
