"""The dashboard of the whole cluster: how many GPUs are held but not used, and by which holders."""

from __future__ import annotations

import itertools

from grafana.panels import (
    CLOSED,
    FREE,
    GPU_HOURS,
    IDLE,
    IDLE_LONG,
    MEANT,
    NEUTRAL,
    NO_DATA,
    OUTSIDE,
    STALLED,
    UNKNOWN,
    USED,
    Board,
    value,
)
from grafana.queries import CLUSTER, PARTS, PEERS, Fleet, alerts_of
from grafana_foundation_sdk.models import dashboard as models

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.model.meanings import STATES as MEANINGS
from gpu_exporter.reports.usage.tenants import oversized
from grafana import panels

UID = "gpu-exporter-fleet"
BARS = 10  # number of bars that fit
BY_SHARE = "A MIG instance or a shared GPU counts by its share."
# The links use values of cells that always exist. A column without any value is absent: its name would stay in the URL.
HOLDER_URL = "/d/gpu-exporter-holder?var-datasource=${datasource}&${cluster:queryparam}"
POD_URL = HOLDER_URL + "&var-namespace=${__data.fields.Namespace}&var-pod=${__value.raw}&var-jobid="
JOB_URL = HOLDER_URL + "&var-namespace=&var-pod=&var-jobid=${__value.raw}"
HOLDER_COLUMNS = {  # by the names that Grafana gives them
    "cluster": "Cluster",
    "namespace": "Namespace",
    "pod": "Pod",
    "job_id": "Job",
    "user": "User",
    "account": "Account",
    "team": "Team",
    "workload": "Workload",
    "Value #gpus": "GPUs",
    "Value #idle": "Idle GPUs",
    "Value #for": "Idle for",
    "Value #since": "Held since",
    "state": "State",
    "cause": "Why",
    "stage": "Mark",
}
REASON_COLUMNS = {
    "cause": "Why",
    "Value #gpus": "GPUs now",
    "Value #hours": "GPU-hours",
    "owner": "What to change",
    "site": "For the site",
}
EMPTY = {  # by the id of the panel
    10: "Nothing waits and nothing is held idle, as far as it is known.",
    16: "No user names are published.",
    21: "No workloads: kube-state-metrics is not scraped.",
}
HOLDER_HIDDEN = ("Time", "scheduler")
HOLDER_WIDTHS = {
    "Namespace": 110,
    "Pod": 150,
    "User": 90,
    "Account": 90,
    "Workload": 120,
    "Cluster": 90,
    "GPUs": 80,
    "Idle GPUs": 95,
    "Idle for": 110,
    "Held since": 165,
    "Mark": 130,
    "Job": 90,
    "State": 130,
}
TENANT_COLUMNS = {
    "namespace": "Namespace",
    "account": "Account",
    "user": "User",
    "Value #held": "Held",
    "Value #idle": "Idle",
    "Value #stalled": "Stalled",
    "Value #unknown": "Unknown",
    "Value #share": "Idle share",
    "Value #cost": "Cost of idle",
}
SMALLER_COLUMNS = {
    "namespace": "Namespace",
    "pod": "Pod",
    "job_id": "Job",
    "user": "User",
    "account": "Account",
    "name": "Model",
    "Value #hours": "GPU-hours",
    "Value #mean": "Utilization",
    "Value #peak": "Most memory",
}
LATER_IDS = {"stalled": 22, "closed": 24}  # the other figures keep their ids
SMALLER_HIDDEN = ("Time", "cluster", "scheduler", "Value #model")


def build(settings: Settings) -> models.Dashboard:
    """The whole dashboard with the windows of these settings."""
    queries, alerts = Fleet(settings), settings.alerts
    idle_for, used_within = format_duration(alerts.idle_for), format_duration(alerts.idle_short)
    board = Board(
        UID,
        "GPUs: fleet",
        "GPUs that are held but not used, and their holders. Data: gpu-exporter.",
        "now-24h",
        "5m",
        EMPTY,
    )
    board.variable("cluster", "Cluster", "label_values(namespace:gpu_gpus:sum, cluster)")
    board.variable("namespace", "Namespace", f"label_values(namespace:gpu_gpus:sum{{{CLUSTER}}}, namespace)")
    board.variable("account", "Account", f"label_values(namespace:gpu_gpus:sum{{{CLUSTER}}}, account)")
    board.annotate("Alerts", alerts_of(CLUSTER), IDLE_LONG)
    board.annotate("Became underused", f"sum(increase(gpu_reconciler_underused_total{{{CLUSTER}}}[5m])) > 0", IDLE)
    parts = (
        ("used", "Used", f"Held GPUs that did some work in the last {used_within}.", USED),
        (
            "idle_short",
            f"Idle under {idle_for}",
            f"Held GPUs that have been idle for {used_within} or more, but less than {idle_for}.",
            IDLE,
        ),
        ("idle_long", f"Idle {idle_for} or more", f"Held GPUs that have been idle for {idle_for} or more.", IDLE_LONG),
        (
            "stalled",
            "Stalled",
            "Held GPUs that are 100 % busy and have made no progress for 15 minutes or longer.",
            STALLED,
        ),
        (
            "unproven|unknown",
            "Use unknown",
            "Held GPUs whose use is unknown, or that only one witness shows as idle.",
            UNKNOWN,
        ),
        ("free", "Free", "GPUs without a holder, for all namespaces.", FREE),
        (
            "closed",
            "Closed",
            "GPUs without a holder on nodes that the scheduler has closed: down, drained or reserved.",
            CLOSED,
        ),
        ("outside", "Outside", "GPUs without a holder that are used outside the scheduler.", OUTSIDE),
        (
            "no_data",
            "No data",
            "GPUs that do not answer, whose holder is unknown, or that the kubelet does not offer to pods.",
            NO_DATA,
        ),
    )
    held = "Held GPUs: used, idle and unknown together. " + BY_SHARE
    numbers = [(PARTS, "Held", held, NEUTRAL)]
    numbers += [(part, title, f"{text} {BY_SHARE}", color) for part, title, text, color in parts]
    ids = itertools.count(1)
    for part, title, text, color in numbers:
        id_ = LATER_IDS.get(part) or next(ids)
        figure = panels.number(id_, title, text, queries.part(part), decimals=1, color=color)
        board.put(figure, 3 if part == PARTS or len(title) > 7 else 2, 4)  # wide enough for the title
    stacked = [(queries.part(part), title, color) for part, title, _, color in parts]
    text = f"Every GPU is in exactly one part at any time. {BY_SHARE}"
    board.put(panels.areas(9, "GPUs over time", text, "none", stacked), 16, 9)
    text = (
        f"Waiting: GPUs that pods or jobs wait for. Held idle: GPUs that are held and idle for {idle_for} or more. "
        "Both by pool: the resource that pods request, or the Slurm partition."
    )
    supply = [(queries.waiting(), "waiting for {{pool}}"), (queries.idle_supply(), "held idle: {{pool}}")]
    board.put(panels.graph(10, "GPUs waited for, and GPUs held idle", text, "none", supply), 8, 9)
    for id_, title, text, expression, unit in (
        (11, "Idle GPU-hours", "GPU-hours of the range that were held and idle.", queries.hours("idle"), GPU_HOURS),
        (
            12,
            "A week before",
            "The same range a week earlier, to compare.",
            queries.hours("idle", before="1w"),
            GPU_HOURS,
        ),
        (
            13,
            "Idle share",
            "Idle GPU-hours as a share of the GPU-hours with known use.",
            queries.idle_share(),
            "percentunit",
        ),
        (
            14,
            "Cost of idle hours",
            "Cost of the idle GPU-hours, if the site has set prices (alerts/prices.example.yaml).",
            queries.cost("idle"),
            "none",
        ),
    ):
        board.put(panels.number(id_, title, text, expression, unit=unit, color=IDLE_LONG), 6, 4)
    for id_, width, title, by, expression, legend in (
        (15, 7, "Idle GPU-hours by namespace or account", "namespace or Slurm account",
         queries.hours("idle", "namespace, account"), "{{namespace}}{{account}}"),
        (16, 5, "Idle GPU-hours by user", "user, if the exporter publishes user names",
         queries.user_hours(), "{{user}}"),
        (21, 7, "Idle GPU-hours by workload", "owner of the pods, such as a Deployment (needs kube-state-metrics)",
         queries.workload_hours(), "{{namespace}}/{{workload}}"),
        (17, 5, "Idle GPU-hours by model", "model of the GPU", queries.model_hours(), "{{name}}"),
    ):  # fmt: skip
        text = f"GPU-hours of the range that were held and idle, by {by}. The {BARS} largest. {BY_SHARE}"
        if id_ in (17, 21):
            text += f" The first {used_within} of each idle time are not included."
        board.put(panels.bars(id_, title, text, GPU_HOURS, queries.largest(expression, BARS), legend), width, 8)
    text = (
        "Causes of low use of GPUs that are held, as far as their hosts show them, and what to change. GPU-hours: of "
        "the range. A GPU with two causes counts in both. Empty if no cause of medium or high confidence is known."
    )
    table = panels.rows(
        23, "Why GPUs are not used, and what to change", text, queries.reasons(), REASON_COLUMNS, ("Time",), "GPU-hours"
    )
    for column, texts in MEANT.items():
        table.override_by_name(column, panels.in_words(texts))
    table.override_by_name("GPU-hours", [value("decimals", 1), value("custom.width", 100)])
    table.override_by_name("GPUs now", [value("decimals", 1), value("custom.width", 90)])
    table.override_by_name("Why", [value("custom.width", 280)])
    table.override_by_name("What to change", [value("custom.width", 660)])
    board.put(table, 24, 8)
    text = (
        f"Pods and jobs by the time for which all of their GPUs have been idle, the first {PEERS}. Idle GPUs: number "
        f"of GPUs that have been idle for {used_within} or more. State: state of most of its GPUs. Mark: stage that "
        "the reconciler reports. Click on a pod or job to open its dashboard."
    )
    table = panels.rows(
        18, "Holders, longest idle first", text, queries.holders(), HOLDER_COLUMNS, HOLDER_HIDDEN, "Idle for"
    )
    idle = panels.colored((None, "text"), (60, IDLE), (alerts.idle_for, IDLE_LONG))
    table.override_by_name("Idle for", [value("unit", "s"), value("decimals", 1), *idle, *panels.or_unknown()])
    table.override_by_name("Held since", [value("unit", "dateTimeAsIso")])
    table.override_by_name("GPUs", [value("decimals", 1)])
    table.override_by_name("Why", panels.in_words(MEANT["Why"]))
    table.override_by_name("State", panels.in_words({state: each.title for state, each in MEANINGS.items()}))
    for name, url in (("Pod", POD_URL), ("Job", JOB_URL)):
        table.override_by_name(name, panels.link("This holder's GPUs", url))
    for name, width in HOLDER_WIDTHS.items():
        table.override_by_name(name, [value("custom.width", width)])
    board.put(table, 24, 12)
    text = (
        f"GPU-hours of the range: held, idle, stalled, and with unknown use, for the {PEERS} that held most. Idle "
        "share: idle hours as a share of the hours with known use. Cost of idle: only if the site has set prices."
    )
    table = panels.rows(
        19, "GPU-hours by namespace, account and user", text, queries.tenants(), TENANT_COLUMNS, ("Time",), "Idle"
    )
    for name in ("Held", "Idle", "Stalled", "Unknown"):
        table.override_by_name(name, [value("unit", GPU_HOURS), value("decimals", 1), *panels.or_unknown()])
    table.override_by_name(
        "Idle share", [value("unit", "percentunit"), value("decimals", 0), *panels.colored(), *panels.or_unknown()]
    )
    table.override_by_name("Cost of idle", [value("decimals", 0)])
    board.put(table, 24, 10)
    text = (
        f"Pods and jobs that held whole GPUs for more than {oversized.HOURS_MIN:g} GPU-hours of the range, used them "
        f"{oversized.MEAN_MAX:.0%} of the time or less, and never used more than {oversized.PEAK_MAX / 1e9:g} GB of "
        "memory on one GPU. A MIG instance or a smaller GPU would be enough. Needs a range of days. No mail is sent, "
        "and no mark is set."
    )
    table = panels.rows(
        20, "Candidates for a smaller GPU", text, queries.smaller(), SMALLER_COLUMNS, SMALLER_HIDDEN, "GPU-hours"
    )
    for name, unit, decimals in (
        ("GPU-hours", GPU_HOURS, 0),
        ("Utilization", "percentunit", 0),
        ("Most memory", "bytes", 1),
    ):
        table.override_by_name(name, [value("unit", unit), value("decimals", decimals)])
    board.put(table, 24, 8)
    return board.build()
