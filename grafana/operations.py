"""The dashboard of the exporters and the reconciler: whether they see everything, and what they did."""

from __future__ import annotations

from grafana.panels import GOOD, IDLE_LONG, NEUTRAL, Board
from grafana.queries import CLUSTER, RAW, Operations, alerts_of
from grafana_foundation_sdk.models import dashboard as models

from gpu_exporter.common.config.defaults import Settings
from grafana import panels

UID = "gpu-exporter-operations"
NODE = "{{node}} {{cluster}}"
# A single query gives the column Value, without the name of the query.
ALERT_COLUMNS = {"alertname": "Alert", "severity": "Severity", "Value": "Firing", "Value #firing": "Firing"}
VERSION_COLUMNS = {"version": "Version", "backend": "Backend", "Value": "Exporters", "Value #exporters": "Exporters"}


def build(settings: Settings) -> models.Dashboard:
    """The whole dashboard with the windows of these settings."""
    queries, alerts = Operations(settings), settings.alerts
    board = Board(
        UID,
        "GPUs: exporters and reconciler",
        "Do the exporters see every GPU, and what did the reconciler do?",
        "now-6h",
        "1m",
    )
    board.variable("cluster", "Cluster", "label_values(gpu_exporter_build_info, cluster)")
    board.variable("job", "Scrape job", f"label_values(gpu_exporter_build_info{{{CLUSTER}}}, job)")
    board.variable("node", "Node", f"label_values(gpu_exporter_build_info{{{RAW}}}, node)")
    board.annotate("Alerts", alerts_of(CLUSTER), IDLE_LONG)
    for id_, title, text, expression, alarm in (
        (1, "Exporters", "Exporters whose metrics arrive at the moment.", queries.exporters(), None),
        (2, "Silent", f"Exporters that reported in the last {queries.lately}, but not now.", queries.silent(), 1),
        (3, "Driver down", "Nodes where GPUs are expected, but no driver answers.", queries.driver_down(), 1),
        (4, "Sources down", "Sources of holders (kubelet, Slurm, files) that do not answer, or answer only in part.",
         queries.zeros("gpu_exporter_attribution_complete"), 1),
        (5, "Collectors failing", "Collectors of metrics whose last reading failed on at least one GPU.",
         queries.zeros("gpu_exporter_collector_success"), 1),
    ):  # fmt: skip
        board.put(panels.number(id_, title, text, expression, color=NEUTRAL, alarm=alarm), 4, 4)
    text = "Time since the reconciler's last cycle with complete evidence."
    late = 10 * 60
    board.put(panels.number(6, "Reconciler's last success", text, queries.last_success(), unit="s", alarm=late), 4, 4)
    text = "Alerts of gpu-exporter that fire now, and how many times each of them fires."
    table = panels.rows(
        7, "Firing alerts", text, {"firing": queries.alerts()},
        ALERT_COLUMNS, ("Time",), "Firing",
    )  # fmt: skip
    board.put(table, 12, 8)
    text = "Number of exporters by version and by backend."
    versions = panels.rows(
        8, "Versions", text, {"exporters": queries.versions()},
        VERSION_COLUMNS, ("Time",), "Exporters",
    )  # fmt: skip
    board.put(versions, 12, 8)
    board.row(9, "Exporters")
    text = "Time since any GPU of the node last answered, for the ten oldest. If a line ends, its exporter is silent."
    age = panels.graph(10, "Age of the last sample", text, "s", [(queries.age(), NODE)], limit=alerts.fresh_max)
    board.put(age, 8, 8)
    text = "Share of the held time with known use of the GPUs, for the ten worst nodes. The rest is unknown, not idle."
    board.put(panels.graph(11, "Coverage", text, "percentunit", [(queries.coverage(), NODE)], most=1), 8, 8)
    text = "Time since the counters were last written to the state directory, for the ten oldest."
    board.put(panels.graph(12, "Age of the state file", text, "s", [(queries.state_age(), NODE)]), 8, 8)
    text = "Failed driver calls and discarded answers per second, by call and error. The ten most frequent."
    board.put(panels.graph(13, "Driver errors", text, "cps", [(queries.errors(), "{{call}} {{error}}")]), 12, 8)
    text = "Duration of the slowest reading of each collector."
    board.put(panels.graph(14, "Duration of collectors", text, "s", [(queries.collectors(), "{{collector}}")]), 12, 8)
    board.row(15, "Reconciler")
    text = "Existing marks on pods and jobs, by stage."
    board.put(panels.graph(16, "Marks", text, "none", [(queries.stages(), "{{stage}}")]), 8, 8)
    text = "Holders by the stage that the reconciler decided, with or without a mark, also in a dry run."
    board.put(panels.graph(17, "Decisions", text, "none", [(queries.decided(), "{{stage}}")]), 8, 8)
    text = "Writes per minute, by result."
    board.put(
        panels.graph(18, "Writes", text, "none", [(queries.reconciler("writes_total", "result"), "{{result}}")]), 8, 8
    )
    text = "Marks per minute that were not set, by reason (docs/reconciler.md, What is refused)."
    board.put(
        panels.graph(19, "Refused", text, "none", [(queries.reconciler("skipped_total", "reason"), "{{reason}}")]), 8, 8
    )
    frozen = {0.0: ("no", GOOD), 1.0: ("frozen", IDLE_LONG)}
    text = "Brakes that keep the reconciler from setting new marks, by reason."
    board.put(panels.timeline(20, "Frozen", text, queries.frozen(), "{{reason}}", frozen), 8, 8)
    text = (
        "Share of the groups that became underused in the range and worked again within the hour, by policy and class. "
        f"Meaningful only over days. Actions require {settings.actions.regret_max:.0%} or less."
    )
    regret = panels.bars(21, "Regret", text, "percentunit", queries.regret(), "{{policy}} {{class}}").max(1)
    board.put(regret, 8, 8)
    text = "Actions on underused holders per minute, by action and result (docs/actions.md)."
    done = [(queries.reconciler("actions_total", "action, result"), "{{action}} {{result}}")]
    board.put(panels.graph(22, "Actions", text, "none", done), 12, 8)
    text = "Underused groups per minute on which the reconciler did not act, by reason."
    held = [(queries.reconciler("actions_skipped_total", "reason"), "{{reason}}")]
    board.put(panels.graph(23, "Actions held back", text, "none", held), 12, 8)
    text = (
        "GPUs that have been idle for long enough, but stay with their holders, by reason and by namespace or account: "
        "opt-outs, waiting gangs, servers, restarts, refused marks, and reasons that hold an action back. The twenty "
        "largest."
    )
    board.put(
        panels.graph(24, "Idle, but not taken back", text, "none", [(queries.spared(), "{{tenant}}: {{reason}}")]),
        16,
        8,
    )
    text = "Idle holders without a decision, because an object cannot be read, by reason and kind of the object."
    unread = [(queries.unreadable(), "{{reason}} {{kind}}")]
    board.put(panels.graph(25, "Unreadable objects", text, "none", unread), 8, 8)
    return board.build()
