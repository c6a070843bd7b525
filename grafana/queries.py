"""The PromQL of the dashboards: one function for each quantity.

Queries over more than an hour read recordings (alerts/src), which have already decided what is held, used, idle and
unknown. So a dashboard of 2,000 GPUs reads only their sums. Raw series are read only for one node, for one holder, or
for the current moment. A count shows 0 only while an exporter really counts: a query adds `or 0 * ...` of an existing
series, never `or vector(0)`.
"""

from __future__ import annotations

from alerts.parameters import HOLDER, KEY, TARGET

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.reports.usage.tenants import oversized

CLUSTER = 'cluster=~"$cluster"'
TENANT = f'{CLUSTER}, namespace=~"$namespace", account=~"$account"'  # jobs have no namespace, which `.*` matches
RAW = f'job=~"$job", {CLUSTER}'
NODE = f'{RAW}, node=~"$node"'
INSTANCE = f'{NODE}, mig_uuid!=""'
# Exactly one holder. A pod has no job_id, and a job has no pod: an empty label is the same as an absent label.
NAMED = f'{CLUSTER}, namespace="$namespace", pod="$pod", job_id="$jobid"'
MINE = f'job=~"$job", {NAMED}'
WHO = f'{MINE}, node=~"$node"'
UNIT = f"{TARGET}, uuid"
PEOPLE = f"{KEY}, gpu, mig"  # with the indexes, for people
CAUSE_NUMBERS = {name: number for number, name in enumerate(CAUSES, start=1)}
PARTS = "used|stalled|idle_short|idle_long|unproven|unknown"
TENANTS = "namespace, account, user"
PEERS = 100  # number of holders or tenants in a table
STAGES = {"candidate": 1, "underused": 2, "partial": 3, "sharing-candidate": 4}
STATE_NUMBERS = {
    state: number
    for number, state in enumerate(
        (
            "unknown",
            "held_no_process",
            "held_idle",
            "stalled",
            "throttled",
            "bursty",
            "low",
            "busy_inefficient",
            "healthy",
        ),
        start=1,
    )
}


class Fleet:
    """The whole cluster, by holder."""

    def __init__(self, settings: Settings) -> None:
        self._hours = settings.alerts.interval / 3600  # per sample of a recording
        self._idle_short = settings.alerts.idle_short

    def part(self, part: str) -> str:
        """Number of GPUs in one part of alerts/src/fleet.yaml, e.g. idle. GPUs without a holder have no tenant."""
        whose = TENANT if part in PARTS else CLUSTER
        gpus = f'sum(namespace:gpu_gpus:sum{{{whose}, part=~"{part}"}})'
        return f"{gpus} or 0 * count(namespace:gpu_gpus:sum{{{CLUSTER}}})"

    def all(self) -> str:
        """GPUs of all parts together."""
        return f"sum(namespace:gpu_gpus:sum{{{CLUSTER}}})"

    def waiting(self) -> str:
        """GPUs that pods and jobs wait for, by pool (the requested resource or partition)."""
        return f"sum by (pool) (pool:gpu_pending_gpus:sum{{{CLUSTER}}})"

    def idle_supply(self) -> str:
        """GPUs held idle, by the same pools."""
        return f"sum by (pool) (pool:gpu_idle_gpus:sum{{{CLUSTER}}})"

    def hours(self, part: str, by: str = "", before: str = "") -> str:
        """GPU-hours of the range. `by`: labels. `before`: shifts the range back by this duration."""
        recording = f'tenant:gpu_gpus:rate5m{{{TENANT}, part=~"{part}"}}[$__range]'
        return f"sum {_by(by)}(sum_over_time({recording}{f' offset {before}' if before else ''})) * {self._hours:g}"

    def cost(self, part: str, by: str = "") -> str:
        """Cost of the range, if the site has set prices (alerts/prices.example.yaml)."""
        recording = f'tenant:gpu_cost:rate{{{TENANT}, part=~"{part}"}}[$__range]'
        return f"sum {_by(by)}(sum_over_time({recording})) * {self._hours:g}"

    def idle_share(self, by: str = "") -> str:
        """Idle GPU-hours as a share of the hours with known use."""
        return f"{self.hours('idle', by)} / ({self.hours('idle|used|stalled', by)} > 0)"

    def user_hours(self) -> str:
        """Idle GPU-hours by user. Pods have no user, and a site may hide the names."""
        return f'label_replace({self.hours("idle", "user")}, "user", "no name", "user", "")'

    def model_hours(self) -> str:
        """GPU-hours held idle, by model."""
        idle = f'namespace:gpu_gpus:sum{{{TENANT}, part=~"idle_short|idle_long"}}[$__range]'
        return f"sum by (name) (sum_over_time({idle})) * {self._hours:g}"

    def workload_hours(self) -> str:
        """GPU-hours held idle, by owner of the pods. Needs kube-state-metrics."""
        idle = f"workload:gpu_idle_gpus:sum{{{TENANT}}}[$__range]"
        return f"sum by (namespace, workload) (sum_over_time({idle})) * {self._hours:g}"

    def largest(self, expression: str, most: int) -> str:
        return f"sort_desc(topk({most}, {expression}))"

    def holders(self) -> dict[str, str]:
        """Holders with the longest idle time, by column of the table: start, number of GPUs, number of idle GPUs, idle
        time, state of most GPUs, mark, and cause.
        """
        idle_run = f'allocation:gpu_idle_run_seconds:known{{{CLUSTER}, namespace=~"$namespace"}}'
        owner = f"allocation:owner:info{{{TENANT}}}"
        units = f"count by ({HOLDER}) (allocation:gpu_share:ratio{{{CLUSTER}}})"
        known = f"(count by ({HOLDER}) ({idle_run}) == on ({HOLDER}) {units})"  # for each of its GPUs
        run = f"min by ({HOLDER}) ({idle_run}) and on ({HOLDER}) {known} and on ({HOLDER}) {owner}"
        top = f"topk({PEERS}, {run})"
        idle = f"count by ({HOLDER}) ({idle_run} >= {self._idle_short:g})"
        labels = "user, account, workload, team"
        mark = 'stage!~"stalled|spinning"'  # a holder may have one of these beside its mark
        stage = f"max by ({HOLDER}, stage) (gpu_reconciler_allocation_stage{{{CLUSTER}, {mark}}})"
        marked = f"topk by ({HOLDER}) (1, {stage}) or on ({HOLDER}) group by ({HOLDER}) ({owner})"
        states = f"count by ({HOLDER}, state) (gpu_allocation_state{{{CLUSTER}}})"  # the state of most of its GPUs
        does = f"clamp(topk by ({HOLDER}) (1, {states}), 1, 1) or on ({HOLDER}) group by ({HOLDER}) ({owner})"
        why = f"clamp(topk by ({HOLDER}) (1, max by ({HOLDER}, cause) (holder:gpu_cause:count{{{CLUSTER}}})), 1, 1)"
        caused = f"{why} or on ({HOLDER}) group by ({HOLDER}) ({owner})"
        start = f"max by ({HOLDER}) (allocation:gpu_start_timestamp_seconds:max{{{CLUSTER}}})"
        who = (
            f"{start} * 1000"  # Grafana's dates are in milliseconds
            f" * on ({HOLDER}) group_left ({labels}) topk by ({HOLDER}) (1, max by ({HOLDER}, {labels}) ({owner}))"
            f" * on ({HOLDER}) group_left (stage) ({marked})"
            f" * on ({HOLDER}) group_left (state) ({does})"
            f" * on ({HOLDER}) group_left (cause) ({caused})"
        )
        return {
            "since": f"({who}) and on ({HOLDER}) {top}",
            "gpus": f"sum by ({HOLDER}) (allocation:gpu_share:ratio{{{CLUSTER}}}) and on ({HOLDER}) {top}",
            "idle": f"({idle} or 0 * ({run})) and on ({HOLDER}) {top}",
            "for": top,
        }

    def reasons(self) -> dict[str, str]:
        """GPUs by cause, now and over the range, by column of the table. A GPU with two causes counts in both."""
        gpus = f"tenant:gpu_cause_gpus:sum{{{TENANT}}}"
        hours = f"sum by (cause) (sum_over_time({gpus}[$__range])) * {self._hours:g}"
        return {"hours": _advised(hours), "gpus": _advised(f"sum by (cause) ({gpus})")}

    def tenants(self) -> dict[str, str]:
        """GPU-hours and cost of the range by namespace, or account and user, by column of the table."""
        held = self.hours("used|stalled|idle|unproven|unknown", TENANTS)
        top = f"and on ({TENANTS}) topk({PEERS}, {held})"
        return {
            "held": f"topk({PEERS}, {held})",
            "idle": f"({self.hours('idle', TENANTS)} or 0 * ({held})) {top}",
            "stalled": f"({self.hours('stalled', TENANTS)} or 0 * ({held})) {top}",
            "unknown": f"({self.hours('unproven|unknown', TENANTS)} or 0 * ({held})) {top}",
            "share": f"{self.idle_share(TENANTS)} {top}",
            "cost": f"{self.cost('idle', TENANTS)} {top}",
        }

    def smaller(self) -> dict[str, str]:
        """Holders for which a smaller GPU would be enough, as in the digest, by column of the table.

        Each query returns only holders that meet all conditions, because the table shows every holder of every query.
        """
        mine = f'{CLUSTER}, namespace=~"$namespace"'
        asked = dict(oversized.queries(HOLDER, "user, account", "$__range", mine))
        small = (
            f"({asked['over_mean']} and on ({HOLDER}) {asked['over_peak']} and on ({HOLDER}) ({asked['over_model']}))"
        )
        return {
            name.removeprefix("over_"): f"{expression} and on ({HOLDER}) {small}" for name, expression in asked.items()
        }


class Holder:
    """One pod or job."""

    def __init__(self, settings: Settings) -> None:
        self._window = format_duration(settings.diagnosis.window)

    def units(self) -> dict[str, str]:
        """GPUs and MIG instances of the holder, by column of the table: start, idle time and state."""
        start = f"max by ({PEOPLE}) (gpu_allocation_start_timestamp_seconds{{{WHO}}})"
        owner = f"topk by ({PEOPLE}) (1, max by ({PEOPLE}, user, account) (gpu_allocation_info{{{WHO}}}))"
        state = f"topk by ({PEOPLE}) (1, max by ({PEOPLE}, state) (gpu_allocation_state{{{WHO}}}))"
        model = f"topk by ({UNIT}) (1, max by ({UNIT}, name) (gpu_info{{{NODE}}}))"
        return {
            "since": f"{start} * 1000 * on ({PEOPLE}) group_left (user, account) {owner}"
            f" * on ({PEOPLE}) group_left (state) {state} * on ({UNIT}) group_left (name) {model}",
            "idle": f"min by ({PEOPLE}) (gpu_allocation_idle_run_seconds{{{WHO}}})",
            "utilization": self.mean(),
        }

    def mean(self) -> str:
        """Mean utilization of the last window, absent while unknown."""
        busy, observed = (
            f"max by ({PEOPLE}) (increase(gpu_allocation_{name}_seconds_total{{{WHO}}}[{self._window}]))"
            for name in ("busy", "observed")
        )
        return f"{busy} / ({observed} > 0)"

    def gpus(self) -> str:
        """Number of GPUs held. A MIG instance or a shared GPU counts by its share."""
        return f"sum(max by ({KEY}) (gpu_allocation_share_ratio{{{WHO}}}))"

    def seen(self, by: str) -> str:
        """Returns the labels `by` of series that the holder had in the range, also if the holder has ended. Only series
        with the last of these labels count.
        """
        last = by.rpartition(" ")[2]
        return f'group by ({by}) (last_over_time(gpu_allocation_share_ratio{{{WHO}, {last}!=""}}[$__range]))'

    def idle_for(self) -> str:
        """Time for which all GPUs of the holder have been idle; absent while this is unknown for one of them."""
        runs = f"min by ({KEY}) (gpu_allocation_idle_run_seconds{{{WHO}}})"
        units = f"count(max by ({KEY}) (gpu_allocation_share_ratio{{{WHO}}}))"
        return f"min({runs}) and count({runs}) == {units}"

    def stage(self) -> str:
        """The stage that the reconciler reports, as a number of STAGES."""
        return _by_number(f"gpu_reconciler_allocation_stage{{{NAMED}%s}}", "stage", STAGES, "max")

    def states(self) -> str:
        """The state of each of its GPUs, as a number of STATE_NUMBERS."""
        return _by_number(
            f"gpu_allocation_state{{{WHO}%s}}", "state", STATE_NUMBERS, "max by (cluster, node, gpu, mig)"
        )

    def causes(self) -> str:
        """The cause of the state of each GPU, as a number of CAUSE_NUMBERS; of several causes, the first in CAUSES."""
        return _by_number(
            f"gpu_allocation_cause{{{WHO}%s}}", "cause", CAUSE_NUMBERS, "max by (cluster, node, gpu, mig)"
        )

    def reasons(self) -> dict[str, str]:
        """The present causes of each of its GPUs, by column of the table."""
        return {"why": _advised(f"max by (cluster, node, gpu, mig, cause, confidence) (gpu_allocation_cause{{{WHO}}})")}

    def numbers(self) -> dict[str, str]:
        """The numbers of these causes, by column of the table."""
        values = f"gpu_allocation_cause_value{{{WHO}}}"
        values = f"max by (cluster, node, gpu, mig, cause, quantity) ({values})"
        return {"number": f'label_join({values}, "number", ": ", "cause", "quantity")'}

    def steps(self) -> str:
        """Steps a second of its training loop, for each of its GPUs."""
        return f"max by (cluster, node, gpu, mig) (rate(gpu_training_steps_total{{{WHO}}}[$__rate_interval]))"

    def step(self) -> str:
        """Seconds of a step of its training loop, for each of its GPUs."""
        return f"max by (cluster, node, gpu, mig) (gpu_training_step_seconds{{{WHO}}})"

    def phase(self, name: str) -> str:
        """Share of the steps of its training loop in a phase, over all ranks; absent if the loop does not report it."""
        some, whole = (
            f'max by ({KEY}, phase) (rate(gpu_training_phase_seconds_total{{{WHO}, phase="{each}"}}[$__rate_interval]))'
            for each in (name, "step")
        )
        return f"sum({some}) / (sum({whole}) > 0)"

    def late(self) -> str:
        """Share of a step that the ranks on each node wait for the slowest one."""
        return f"max by (cluster, node) (gpu_training_rank_late_ratio{{{WHO}}})"

    def own(self, name: str) -> str:
        """A gauge of the holder, for each of its GPUs."""
        return f"max by (cluster, node, gpu, mig) (gpu_allocation_{name}{{{WHO}}})"

    def whole(self, name: str) -> str:
        """The maximum per node of a gauge of the whole holder."""
        return f"max by (cluster, node) (gpu_allocation_{name}{{{WHO}}})"

    def of_its_gpus(self, name: str) -> str:
        """A gauge of the whole GPUs that it holds."""
        held = f'gpu_allocation_share_ratio{{{WHO}, mig_uuid=""}} == 1'
        return f"max by (cluster, node, gpu) (max by ({UNIT}, gpu) ({name}{{{NODE}}}) and on ({UNIT}) ({held}))"

    def of_its_instances(self, name: str) -> str:
        """A gauge of the MIG instances that it holds."""
        held = f'gpu_allocation_share_ratio{{{WHO}, mig_uuid!=""}}'
        gauge = f"max by ({UNIT}, gpu, mig, mig_uuid) ({name}{{{NODE}}})"
        return f"max by (cluster, node, gpu, mig) ({gauge} and on ({UNIT}, mig_uuid) {held})"

    def throttled(self) -> str:
        """Share of time in which one of its GPUs was slowed down, by reason; absent if none was."""
        slowed = f"max by ({UNIT}, reason) (rate(gpu_throttle_seconds_total{{{NODE}}}[$__rate_interval]))"
        return f"max by (reason) ({slowed} and on ({UNIT}) gpu_allocation_share_ratio{{{WHO}}}) > 0"


class Node:
    """All GPUs of the cluster by utilization, and one node."""

    def distribution(self) -> str:
        """Number of GPUs at or below each limit of utilization."""
        return f"sum by (le) (cluster:gpu_utilization:bucket{{{CLUSTER}}})"

    def nodes(self) -> dict[str, str]:
        """Current values of each node of the cluster, by column of the table."""
        held = f"sum by ({TARGET}) (max by ({KEY}) (gpu_allocation_share_ratio{{{RAW}}}))"
        expected = f"max by ({TARGET}) (gpu_devices_expected{{{RAW}}})"
        answer = f"count by ({TARGET}) (max by ({UNIT}) (gpu_up{{{RAW}}}) == 1)"
        known = f"sum by ({TARGET}) (unit:gpu_utilization:ratio5m{{{CLUSTER}}})"
        return {
            "gpus": expected,
            "answer": f"{answer} or 0 * {expected}",
            "held": f"{held} or 0 * max by ({TARGET}) (gpu_allocated{{{RAW}}})",
            "utilization": f"{known} / (count by ({TARGET}) (unit:gpu_utilization:ratio5m{{{CLUSTER}}}) > 0)",
            "power": f"sum by ({TARGET}) (max by ({UNIT}) (gpu_power_watts{{{RAW}}}))",
            "temperature": f"max by ({TARGET}) (gpu_temperature_celsius{{{RAW}}})",
        }

    def answering(self) -> str:
        """GPUs of the cluster that answer."""
        up = f"max by ({UNIT}) (gpu_up{{{RAW}}})"
        return f"count({up} == 1) or 0 * count({up})"

    def lost(self) -> str:
        """GPUs of the cluster that should answer, but do not."""
        up = f"max by ({UNIT}) (gpu_up{{{RAW}}})"
        return f"count({up} == 0) or 0 * count({up})"

    def held(self) -> str:
        """GPUs of the cluster that have a holder."""
        share = f"sum(max by ({KEY}) (gpu_allocation_share_ratio{{{RAW}}}))"
        return f"{share} or 0 * count(gpu_allocated{{{RAW}}})"

    def gauge(self, name: str) -> str:
        """A gauge of each GPU."""
        return f"max by (cluster, node, gpu) ({name}{{{NODE}}})"

    def rate(self, name: str, by: str = "") -> str:
        """The rate of a counter of each GPU."""
        return f"max by (cluster, node, gpu{f', {by}' if by else ''}) (rate({name}{{{NODE}}}[$__rate_interval]))"

    def throttled(self) -> str:
        """Share of time in which each GPU was slowed down, by reason; absent if it was not."""
        return f"{self.rate('gpu_throttle_seconds_total', 'reason')} > 0"

    def memory(self) -> str:
        """Used share of each GPU's memory."""
        used, total = (f"max by (cluster, node, gpu) (gpu_memory_{what}_bytes{{{NODE}}})" for what in ("used", "total"))
        return f"{used} / ({total} > 0)"

    def power_share(self) -> str:
        """Power of each GPU as a share of its limit."""
        used, limit = (f"max by (cluster, node, gpu) (gpu_power{what}_watts{{{NODE}}})" for what in ("", "_limit"))
        return f"{used} / ({limit} > 0)"

    def xids(self) -> str:
        """XID errors of the range in the cluster, by class."""
        events = f"max by ({UNIT}, class) (increase(gpu_xid_events_total{{{RAW}}}[$__range]))"
        return f"round(sum by (class) ({events}))"

    def health(self) -> dict[str, str]:
        """Faults of each GPU, by column of the table."""
        gpu = f"{UNIT}, gpu"
        model = f"topk by ({UNIT}) (1, max by ({UNIT}, name, driver_version) (gpu_info{{{NODE}}}))"
        up = f"max by ({gpu}) (gpu_up{{{NODE}}})"
        known = f"({model} or on ({UNIT}) group by ({UNIT}) (gpu_up{{{NODE}}}))"
        return {
            "up": f"{up} * on ({UNIT}) group_left (name, driver_version) {known}",
            "action": f"max by ({gpu}) (gpu_recovery_action{{{NODE}}})",
            "uncorrected": f'max by ({gpu}) (gpu_ecc_errors_total{{{NODE}, severity="uncorrected"}})',
            "unusable": f'max by ({gpu}) (gpu_condition{{{NODE}, severity="unusable"}})',
            "degraded": f'max by ({gpu}) (gpu_condition{{{NODE}, severity="degraded"}})',
            "replays": f"max by ({gpu}) (increase(gpu_pcie_replays_total{{{NODE}}}[$__range]))",
            "margin": f"min by ({gpu}) (gpu_temperature_margin_celsius{{{NODE}}})",
        }

    def holders(self) -> str:
        """1 for each holder of each GPU, as long as it holds the GPU."""
        shares = f"max by ({KEY}, gpu, mig) (gpu_allocation_share_ratio{{{NODE}}})"
        named = f'label_join({shares}, "holder", "/", "namespace", "pod")'
        named = f'label_replace({named}, "holder", "job $1", "job_id", "(.+)")'
        return f"clamp(max by (cluster, node, gpu, mig, holder) ({named}), 1, 1)"

    def instances(self) -> dict[str, str]:
        """MIG instances: their activity, and the free part of their GPU, by column of the table."""
        mig = f"{UNIT}, gpu, mig, mig_uuid"
        info = f"topk by ({mig}) (1, max by ({mig}, profile) (gpu_mig_info{{{NODE}}}))"
        share = f"max by ({mig}, namespace, pod, job_id) (gpu_allocation_share_ratio{{{INSTANCE}}})"
        whose = f'label_join({share}, "holder", "/", "namespace", "pod")'
        whose = f'label_replace({whose}, "holder", "job $1", "job_id", "(.+)")'
        holder = f"topk by ({mig}) (1, max by ({mig}, holder) ({whose})) or on ({mig}) group by ({mig}) ({info})"
        free = f'max by ({UNIT}) (unit:gpu_not_held:part{{{CLUSTER}, part="free"}})'
        return {
            "info": f"{info} * on ({mig}) group_left (holder) clamp({holder}, 1, 1)",
            "activity": f"max by ({mig}) (gpu_mig_graphics_active_ratio{{{NODE}}})",
            "memory": f"max by ({mig}) (gpu_mig_memory_used_bytes{{{NODE}}})",
            "power": f"max by ({mig}) (gpu_mig_power_watts{{{NODE}}})",
            "free": f"{info} * 0 + on ({UNIT}) group_left {free}",
        }


class Operations:
    """The exporters and the reconciler."""

    def __init__(self, settings: Settings) -> None:
        self.lately = format_duration(settings.alerts.idle_for)
        self._reporting = f"max by ({TARGET}) (gpu_exporter_build_info{{{NODE}}})"

    def exporters(self) -> str:
        return f"count({self._reporting})"

    def silent(self) -> str:
        """Exporters that reported recently, but do not now."""
        lately = f"max by ({TARGET}) (last_over_time(gpu_exporter_build_info{{{NODE}}}[{self.lately}]))"
        return f"count({lately} unless on ({TARGET}) {self._reporting}) or 0 * count({lately})"

    def driver_down(self) -> str:
        """Number of nodes where GPUs are expected or unbound (no kernel driver), but no driver answers."""
        missed = f'gpu_devices_expected{{{NODE}}} > 0 or gpu_devices_unmanaged{{{NODE}, driver="none"}} > 0'
        driver = f"gpu_driver_up{{{NODE}}}"
        return f"count({driver} == 0 and on ({TARGET}) ({missed})) or 0 * count({driver})"

    def zeros(self, gauge: str) -> str:
        """Number of series that are 0."""
        series = f"{gauge}{{{NODE}}}"
        return f"count({series} == 0) or 0 * count({series})"

    def versions(self) -> str:
        return f"count by (version, backend) (max by ({TARGET}, version, backend) (gpu_exporter_build_info{{{NODE}}}))"

    def age(self) -> str:
        """Age of the newest sample of each node, oldest first."""
        last = f"gpu_exporter_last_sample_timestamp_seconds{{{NODE}}}"
        return f"topk(10, max by (cluster, node) (timestamp({last}) - {last}))"

    def coverage(self) -> str:
        """Share of the held time for which the use of the GPUs is known, over half an hour, for the ten worst nodes."""
        node = f'{CLUSTER}, node=~"$node"'
        held = f"count by (cluster, node) (allocation:gpu_share:ratio{{{node}}})"
        known = f"sum by (cluster, node) (allocation:gpu_coverage:ratio30m{{{node}}})"  # absent while nothing is known
        return f"bottomk(10, clamp_max(({known} or 0 * {held}) / ({held} > 0), 1))"

    def errors(self) -> str:
        """Failed driver calls, by call."""
        return f"topk(10, sum by (call, error) (rate(gpu_exporter_driver_errors_total{{{NODE}}}[$__rate_interval])))"

    def collectors(self) -> str:
        """The longest last cycle of each collector."""
        return f"max by (collector) (gpu_exporter_collector_duration_seconds{{{NODE}}})"

    def state_age(self) -> str:
        """Time since the counters were last written."""
        last = f"gpu_exporter_state_last_write_timestamp_seconds{{{NODE}}}"
        return f"topk(10, max by (cluster, node) (timestamp({last}) - {last}))"

    def alerts(self) -> str:
        firing = f'ALERTS{{{CLUSTER}, alertstate="firing", alertname=~"Gpu.+"}}'
        return f"count by (alertname, severity) ({firing})"

    def stages(self) -> str:
        return f"sum by (stage) (gpu_reconciler_labelled{{{CLUSTER}}})"

    def decided(self) -> str:
        return f"count by (stage) (gpu_reconciler_allocation_stage{{{CLUSTER}}})"

    def reconciler(self, counter: str, label: str) -> str:
        """Events per minute."""
        return f"sum by ({label}) (rate(gpu_reconciler_{counter}{{{CLUSTER}}}[$__rate_interval])) * 60"

    def frozen(self) -> str:
        return f"max by (reason) (gpu_reconciler_frozen{{{CLUSTER}}})"

    def last_success(self) -> str:
        """Time since the last success, of the cluster where it is longest."""
        last = f"max by (cluster) (gpu_reconciler_last_success_timestamp_seconds{{{CLUSTER}}})"
        return f"max(time() - {last})"

    def regret(self) -> str:
        """Returns the share of regrets: of the groups that became underused in the range and have a known outcome, the
        share that worked again within an hour.
        """
        counted = f'gpu_reconciler_outcomes_total{{{CLUSTER}, outcome=~"%s"}}'
        wrong, known = (
            f"sum by (policy, class) (increase({counted % outcomes}[$__range]))"
            for outcomes in ("regret", "regret|right")
        )
        return f"{wrong} / ({known} > 0)"

    def spared(self) -> str:
        """GPUs that were idle for long enough, but stay with their holders; the twenty largest rows."""
        return f"topk(20, sum by (reason, tenant) (gpu_reconciler_spared_gpus{{{CLUSTER}}}))"

    def unreadable(self) -> str:
        return f"sum by (reason, kind) (gpu_reconciler_unreadable{{{CLUSTER}}})"


def alerts_of(matchers: str) -> str:
    """Annotations: firing alerts, each name once."""
    return f'max by (alertname) (ALERTS{{{matchers}, alertstate="firing", alertname=~"Gpu.+"}})'


def _by(labels: str) -> str:
    return f"by ({labels}) " if labels else ""


def _by_number(series: str, label: str, numbers: dict[str, int], aggregate: str) -> str:
    """Returns PromQL that turns the text of this label into its number. `series`: contains %s for further matchers."""
    matched = ((series % f', {label}="{text}"', number) for text, number in numbers.items())
    return " or ".join(f"{aggregate} ({one}) * {number}" for one, number in matched)


def _advised(expression: str) -> str:
    """Add the labels `owner` and `site`, which repeat the cause for the columns with what each can change."""
    for label in ("owner", "site"):
        expression = f'label_join({expression}, "{label}", "", "cause")'
    return expression
