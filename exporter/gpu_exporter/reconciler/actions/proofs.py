"""Reads the proofs that an action needs from Alertmanager and from the PromQL API:

- The owner was warned, and for long enough.
- Pods or jobs wait for GPUs of the same pool.
- The holders do not work on their hosts.
- Members without GPUs do not work.
- The pods and jobs that an earlier action ended no longer hold a GPU.

A missing or partial answer proves nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from gpu_exporter.common.address import Address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB
from gpu_exporter.common.outside import load_json, parse_timestamp
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.promql.vector import VectorRow, cluster_matchers, literal, parse_vector, quote
from gpu_exporter.reconciler.evidence.matchers import MATCHER_MAX, alternatives, match_any, restrict
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name, refuse_several

ALERT = "GpuHolderIdle"  # the alert in alerts/rules/owners.yaml that owners receive
FILTER_MAX = 4000  # characters: the whole URL stays below 8 kB, which proxies allow
ANSWER_MAX = 4 * MIB
WITHIN_S = 5.0  # per answer: the next cycle, which withdraws marks, waits for these answers
ASKED = {"active": "true", "silenced": "false", "inhibited": "false", "unprocessed": "false"}
WAITED_S = 900.0
WAITED = "15m"  # how long pods or jobs must have waited
ENOUGH = 0.9  # share of the rule evaluations in that time with a sample: without a sample, the demand is unknown
HOLDER = "cluster, scheduler, namespace, pod, job_id"
RATE_S = 300.0  # range of rate() on cgroup counters, which are scraped every 15 to 60 s
STEPS_MAX = 1000  # steps of a subquery over the whole idle time
KNOWN_MIN = 0.9  # share of these steps that must have a value
CPU, READ, WRITTEN = (f"container_{name}_total" for name in ("cpu_usage_seconds", "fs_reads_bytes", "fs_writes_bytes"))


class Warned(NamedTuple):
    """A warning: the owner has been warned since `since_wall` (Unix seconds), by these receivers of Alertmanager."""

    since_wall: float
    receivers: tuple[str, ...]


class Alert(NamedTuple):
    """An alert about a holder.

    `cluster`: the alert's label `cluster`. `warned`: None if the alert has no receiver, or an invalid start time.
    """

    name: HolderName
    cluster: str
    warned: Warned | None


class Work(NamedTuple):
    """Activity of a holder or pod on its host. A value is None if it is unknown.

    `cpu`: for a holder, the used share of its CPUs; for a pod without GPUs, a number of CPUs.
    `io_bytes_per_s`: disk reads and writes, bytes per second. `cpus`: the number of a holder's CPUs.
    """

    cpu: float | None
    io_bytes_per_s: float | None
    cpus: float | None = None


NOT_KNOWN = Work(None, None)


class Shown(NamedTuple):
    """The allocations of one holder's name that exporters show now.

    `uids`: the UIDs of its pods, "" for an allocation without a UID. `start_wall`: the earliest start (Unix seconds),
    if known.
    """

    uids: frozenset[str]
    start_wall: float | None


class Proofs:
    """Reads the proofs. Every call may raise AnswerError."""

    def __init__(
        self,
        prometheus: Address,
        alertmanager: Address,
        filters: Sequence[str],
        matcher: str,
        rules_s: float,
        fetch: Fetch,
        fetch_alerts: Fetch,
    ) -> None:
        """`filters`: additional matchers for the alerts, e.g. cluster="a".
        `matcher`: the matchers for the exporters' series. Those on `cluster` apply to every query here.
        `rules_s`: evaluation interval of the rules (seconds).
        """
        self._prometheus, self._alertmanager = prometheus, alertmanager
        self._matcher = matcher
        self._cluster = cluster_matchers(matcher)
        self._filters = (f'alertname="{ALERT}"', 'audience="owner"', *self._cluster, *filters)
        self._is_pinned = any(cluster_matchers(each) for each in self._filters)
        self._samples = math.floor(ENOUGH * WAITED_S / rules_s)
        self._fetch, self._fetch_alerts = fetch, fetch_alerts

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        """Reads the warnings to the owners of these holders: alerts that have a receiver and are not silenced."""
        alerts: list[Alert] = []
        for matchers in restrict(names, FILTER_MAX):
            query = urlencode(
                [*ASKED.items(), *(("filter", each) for each in (*self._filters, *matchers.split(",", 1)))]
            )
            page = self._alertmanager.page("/api/v2/alerts", query)
            alerts += parse_alerts(self._fetch_alerts(page, None, ANSWER_MAX, WITHIN_S), names)
        clusters = {alert.cluster for alert in alerts}
        if "" in clusters:  # the alerts of this site name no cluster, so alerts that name one come from other rules
            alerts = [alert for alert in alerts if not alert.cluster]
        else:
            refuse_several(clusters, "Alertmanager returned alerts", "--alertmanager.filter")
            if clusters and not self._is_pinned:  # several clusters may have a holder of that name
                cluster = min(clusters)
                its = f"--alertmanager.filter='cluster=\"{quote(cluster)}\"'"
                raise AnswerError(f"the alerts name cluster {cluster}: if it is yours, set {its}")
        found: dict[HolderName, Warned] = {}
        for name, _, warned in alerts:  # if a holder has two alerts, the younger one counts
            if warned is not None and (name not in found or warned.since_wall > found[name].since_wall):
                found[name] = warned
        return found

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        """Reads the number of GPUs that others waited for during all of WAITED, by holder and pool of its GPUs."""
        demand: defaultdict[HolderName, dict[str, float]] = defaultdict(dict)
        clusters: set[str] = set()
        for of_these in restrict(names):
            matcher = ",".join([of_these, *self._cluster])
            rows = self._ask(
                f"group by ({HOLDER}, pool) (allocation:gpu_pool:info{{{matcher}}}) * on (cluster, pool) "
                f"group_left () ({self._waited('cluster, pool')} >= 1)",
                clusters,
            )
            for row in rows:
                clusters.add(row.labels.get("cluster", ""))
                demand[holder_name(row.labels)][row.labels.get("pool", "")] = row.value
        return demand

    def read_pending(self, pools: Collection[str]) -> Mapping[str, float]:
        """Reads the number of GPUs that others waited for during all of WAITED, by pool; 0 if none waited.

        Omits a pool without samples for most of that time. If the source has several clusters, the highest value
        counts.
        """
        found: dict[str, float] = {}
        for of_these in match_any("pool", pools):
            rows = self._ask(self._waited("pool", ",".join([of_these, *self._cluster])))
            found |= {row.labels.get("pool", ""): row.value for row in rows}
        return found

    def _waited(self, by: str, matchers: str = "") -> str:
        capped = f"pool:gpu_pending_gpus:capped{{{matchers}}}[{WAITED}]"
        return f"max by ({by}) (min_over_time({capped}) and count_over_time({capped}) >= {self._samples})"

    def read_host_work(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, Work]]:
        """Reads the present work of these holders on their hosts, by node. Without the label `node`, by `instance`."""
        found: defaultdict[HolderName, dict[str, Work]] = defaultdict(dict)
        for of_these in restrict(names):
            matcher = self._of_exporters(of_these)
            for at, family in enumerate(("activity_ratio", "io_bytes_per_second", "cpus")):
                query = f"max by ({HOLDER}, node, instance) (gpu_allocation_host_{family}{{{matcher}}})"
                for row in self._ask(query):
                    name, place = holder_name(row.labels), row.labels.get("node") or row.labels.get("instance", "")
                    if name in names:
                        work = list(found[name].get(place, NOT_KNOWN))
                        work[at] = row.value
                        found[name][place] = Work(*work)
        return found

    def read_rest(self, namespace: str, pods: Collection[str], idle_s: float) -> Mapping[str, Work]:
        """Returns the highest activity of each of these pods in the last `idle_s` seconds, from the cAdvisor metrics of
        the kubelets.

        A pod is missing in the answer if its series do not cover most of that time (KNOWN_MIN).
        """
        step_s = max(60.0, math.ceil(idle_s / STEPS_MAX))
        window, step, over = f"{idle_s:.0f}s", f"{step_s:.0f}s", f"{max(RATE_S, step_s):.0f}s"
        wanted = f'pod=~"{"|".join(map(literal, sorted(pods)))}"'
        matchers = ",".join([*self._cluster, f'namespace="{quote(namespace)}"', wanted])

        def rate(family: str) -> str:
            # The sum over containers where the source has these series, else the series of the whole pod.
            each, whole = (f'{family}{{{matchers},container{op}""}}[{over}]' for op in ("!=", "="))
            return f"(sum by (cluster, pod) (rate({each})) or sum by (cluster, pod) (rate({whole})))"

        def by_pod(query: str) -> dict[str, float]:
            return {row.labels.get("pod", ""): row.value for row in self._ask(query)}

        steps = by_pod(f"count_over_time({rate(CPU)}[{window}:{step}])")
        cpu = by_pod(f"max_over_time({rate(CPU)}[{window}:{step}])")
        read, written = (by_pod(f"max_over_time({rate(family)}[{window}:{step}])") for family in (READ, WRITTEN))
        # A container without disk traffic has no series. This counts as 0 only if its kubelet reports other containers.
        rows = self._ask(f"group by (cluster, pod, instance) ({CPU}{{{matchers}}})")
        kubelets = {pod: {r.labels.get("instance", "") for r in rows if r.labels.get("pod") == pod} for pod in pods}
        those = "|".join(map(literal, sorted(set().union(*kubelets.values()))))
        of_those = ",".join([*self._cluster, f'instance=~"{those}"'])
        shown = self._ask(f"group by (cluster, instance) ({WRITTEN}{{{of_those}}})") if those else []
        speaking = {row.labels.get("instance", "") for row in shown}
        needed = KNOWN_MIN * idle_s / step_s
        return {
            pod: Work(cpu.get(pod), read.get(pod, 0.0) + written.get(pod, 0.0) if kubelets[pod] & speaking else None)
            for pod in pods
            if steps.get(pod, 0.0) >= needed
        }

    def read_shown(self, names: Collection[HolderName]) -> Mapping[HolderName, Shown]:
        """Returns the pod UIDs and the start of each of these holders that an exporter shows now."""
        uids: defaultdict[HolderName, set[str]] = defaultdict(set)
        starts: dict[HolderName, float] = {}
        for of_these in restrict(names):
            matcher = self._of_exporters(of_these)
            for row in self._ask(f"group by ({HOLDER}, pod_uid) (gpu_allocation_info{{{matcher}}})"):
                uids[holder_name(row.labels)].add(row.labels.get("pod_uid", ""))
            for row in self._ask(f"min by ({HOLDER}) (gpu_allocation_start_timestamp_seconds{{{matcher}}})"):
                starts[holder_name(row.labels)] = row.value
        return {name: Shown(frozenset(uids[name]), starts.get(name)) for name in names if name in uids}

    def read_fresh(self, nodes: Collection[str], within_s: float) -> set[str]:
        """Returns the nodes whose exporter took a sample within the last `within_s` seconds. Without the label `node`,
        a node has the name in `instance`.
        """
        found: set[str] = set()
        for batch in alternatives(nodes, MATCHER_MAX // 2):
            places = (f'node=~"{batch}"', f'node="",instance=~"{batch}"')
            last = " or ".join(
                f"gpu_exporter_last_sample_timestamp_seconds{{{self._of_exporters(place)}}}" for place in places
            )
            for row in self._ask(f"max by (cluster, node, instance) ({last}) >= time() - {within_s:g}"):
                found.add(row.labels.get("node") or row.labels.get("instance", ""))
        return found

    def _of_exporters(self, wanted: str) -> str:
        return ",".join(part for part in (self._matcher, wanted) if part)

    def _ask(self, query: str, clusters: Collection[str] = ()) -> list[VectorRow]:
        """Returns the rows of a query. Raises AnswerError if the rows and `clusters` together name several clusters."""
        rows = parse_vector(
            self._fetch(self._prometheus.page("/api/v1/query"), {"query": query}, ANSWER_MAX, WITHIN_S), query
        )
        refuse_several({row.labels.get("cluster", "") for row in rows} | set(clusters), "the source returned series")
        return rows


def parse_alerts(text: str, names: Collection[HolderName]) -> list[Alert]:
    """Returns the alerts about these holders in an answer of /api/v2/alerts. Raises AnswerError.

    The filters match a pod name in all namespaces, so the answer may contain alerts about other holders.
    """
    try:
        rows: list[Any] = load_json(text)
        alerts = [_parse_alert(row) for row in rows]
    except (ValueError, TypeError, RecursionError) as exc:
        raise AnswerError(f"cannot parse Alertmanager's answer of /api/v2/alerts ({type(exc).__name__})") from exc
    if rows and not any(alerts):
        raise AnswerError(
            f"cannot parse Alertmanager's answer of /api/v2/alerts (none of the {len(rows)} entries is a valid alert)"
        )
    return [alert for alert in alerts if alert is not None and alert.name in names]


def _parse_alert(row: Any) -> Alert | None:
    """One alert; None if it is malformed, because a malformed alert proves nothing."""
    try:
        return _read_alert(row)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _read_alert(row: Any) -> Alert:
    labels: Mapping[str, str] = row["labels"]
    since = parse_timestamp(str(row["startsAt"]))
    receivers = tuple(str(each["name"]) for each in row["receivers"])
    is_sent = row["status"]["state"] == "active" and bool(receivers) and since is not None
    warned = Warned(since or 0.0, receivers) if is_sent else None
    return Alert(holder_name(labels), str(labels.get("cluster", "")), warned)
