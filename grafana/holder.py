"""The dashboard of one pod or job: the activity of each of its GPUs, and reasons for low use."""

from __future__ import annotations

from grafana.panels import (
    FREE,
    GOOD,
    IDLE,
    IDLE_LONG,
    MEANT,
    NEUTRAL,
    OUTSIDE,
    STALLED,
    STATES,
    UNKNOWN,
    Board,
    value,
)
from grafana.queries import CAUSE_NUMBERS, CLUSTER, MINE, STAGES, STATE_NUMBERS, Holder, alerts_of
from grafana_foundation_sdk.models import dashboard as models

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.model.meanings import CAUSES, sentence
from gpu_exporter.common.model.meanings import STATES as MEANINGS
from gpu_exporter.common.report_rules import PHASES
from grafana import panels

UID = "gpu-exporter-holder"
STAGE_COLORS = {"candidate": IDLE, "underused": IDLE_LONG, "partial": OUTSIDE, "sharing-candidate": NEUTRAL}
# By what has to change: the site, the number of CPUs and threads, the files, the memory, the job itself.
CAUSE_COLORS = {
    **dict.fromkeys(("link_degraded", "far_numa", "cpu_contended", "node_memory"), UNKNOWN),
    **dict.fromkeys(
        ("cpu_quota", "cpu_oversubscribed", "cpu_bound_input", "too_few_workers", "pinned_loaders", "input_wait"), IDLE
    ),
    **dict.fromkeys(("checkpointing", "remote_io", "small_file_io", "checkpoint_share", "cpu_logging"), OUTSIDE),
    **dict.fromkeys(("memory_pressure", "shm_full"), STALLED),
    **dict.fromkeys(("no_process", "unused_gpu", "late_rank", "lost_rank"), IDLE_LONG),
    **dict.fromkeys(("starting", "interactive", "steps_elsewhere", "cpu_work"), FREE),
    **dict.fromkeys(("data_parallel", "launch_bound", "small_batch", "no_mixed_precision"), GOOD),
}
REASON_COLUMNS = {
    "node": "Node",
    "gpu": "GPU",
    "mig": "MIG",
    "cause": "Why",
    "owner": "What to change",
    "confidence": "Confidence",
}
REASON_WIDTHS = {"Node": 110, "GPU": 60, "MIG": 60, "Why": 290, "Confidence": 100}
REASON_HIDDEN = ("Time", "cluster", "site", "Value", "Value #why")  # the site's change is on the fleet's page
NUMBER_COLUMNS = {"node": "Node", "gpu": "GPU", "number": "Number", "Value": "Value", "Value #number": "Value"}
NUMBER_WIDTHS = {"Node": 110, "GPU": 60, "Value": 90}
NUMBER_HIDDEN = ("Time", "cluster", "mig", "cause", "quantity")
EMPTY = {  # by the id of the panel
    7: "No state is reported in this time.",
    8: "No mark in this time.",
    10: "Not counted: GPM needs Hopper or newer.",
    14: "No GPU was reported as slowed down.",
    15: "Its cgroup is not visible.",
    16: "Its cgroup is not visible.",
    17: "No cause in this time.",
    19: "No training loop reports its steps (docs/torch.md).",
    20: "No training loop reports its phases (docs/torch.md).",
    21: "No data of its ranks and GPUs.",
}
UNIT_COLUMNS = {
    "node": "Node",
    "gpu": "GPU",
    "mig": "MIG",
    "container": "Container",
    "name": "Model",
    "user": "User",
    "account": "Account",
    "state": "State",
    "Value #utilization": "Utilization",
    "Value #idle": "Idle for",
    "Value #since": "Held since",
}
UNIT_HIDDEN = ("Time", "cluster", "uuid", "mig_uuid", "scheduler", "namespace", "pod", "job_id")
NODE_URL = "/d/gpu-exporter-node?var-datasource=${datasource}&${cluster:queryparam}&var-node=${__value.raw}"
UNIT_LEGEND = "{{node}} GPU {{gpu}} {{mig}} {{cluster}}"


def build(settings: Settings) -> models.Dashboard:
    """The whole dashboard with the windows of these settings."""
    queries, policy = Holder(settings), settings.policy
    window = format_duration(settings.diagnosis.window)
    board = Board(
        UID,
        "GPUs: one pod or job",
        "Activity of the GPUs of one holder, and reasons for low use. Links select namespace and pod, or a Slurm job.",
        "now-6h",
        "1m",
        EMPTY,
    )
    board.variable("cluster", "Cluster", "label_values(gpu_exporter_build_info, cluster)")
    board.variable("job", "Scrape job", f"label_values(gpu_exporter_build_info{{{CLUSTER}}}, job)")
    # Values of whole GPUs are read only from these nodes, because a cluster may have hundreds of nodes.
    board.variable("node", "Node", f"label_values(gpu_allocation_share_ratio{{{MINE}}}, node)", listed=True)
    board.text("namespace", "Namespace")
    board.text("pod", "Pod")
    board.text("jobid", "Slurm job")
    whose = f'{CLUSTER}, namespace="$namespace", pod="$pod", job_id="$jobid"'
    board.annotate("Alerts", alerts_of(whose), IDLE_LONG)
    stage = panels.number(
        1,
        "Mark",
        "Current stage of the holder, as the reconciler reports it. No data without a stage.",
        queries.stage(),
        color=NEUTRAL,
    )
    names = {
        f"{number:g}": models.ValueMappingResult(text=text, color=STAGE_COLORS[text]) for text, number in STAGES.items()
    }
    stage.mappings([models.ValueMap(names)]).no_value("none")
    text = "Number of GPUs that the holder has. A MIG instance or a shared GPU counts by its share."
    board.put(panels.number(2, "GPUs", text, queries.gpus(), decimals=1), 4, 4)
    text = (
        "Time for which all of its GPUs have been idle without a break. Unknown while this is unknown for one of them."
    )
    board.put(panels.number(3, "Idle for", text, queries.idle_for(), unit="s", alarm=policy.candidate_after), 5, 4)
    board.put(stage, 7, 4)
    text = "CPU cores in use on the busiest node, mean of ten minutes. Shows work on the host."
    cores = f"max({queries.whole('host_activity_ratio')} * {queries.whole('host_cpus')})"
    board.put(panels.number(4, "CPU cores", text, cores, decimals=1, color=GOOD), 4, 4)
    text = "Bytes per second to and from disks on the busiest node, mean of ten minutes, without network file systems."
    board.put(
        panels.number(
            5, "Disks", text, f"max({queries.whole('host_io_bytes_per_second')})", unit="Bps", color=GOOD
        ), 4, 4,
    )  # fmt: skip
    text = (
        "Why its GPUs are not used well now, as far as its host shows it, and what to change. Empty if no cause of "
        "medium or high confidence is known: `gpu-exporter explain` names what would have to be known."
    )
    table = panels.rows(
        23, "Why, and what to change", text, queries.reasons(), REASON_COLUMNS, REASON_HIDDEN, "Confidence"
    )
    for column in ("Why", "What to change"):
        table.override_by_name(column, panels.in_words(MEANT[column]))
    for column, width in REASON_WIDTHS.items():
        table.override_by_name(column, [value("custom.width", width)])
    board.put(table, 24, 5)
    text = (
        f"One row for each GPU or MIG instance of the holder. Utilization: mean over the last {window}. Idle for: "
        "length of the current idle run. Both show unknown where there is no proof."
    )
    table = panels.rows(6, "Its GPUs", text, queries.units(), UNIT_COLUMNS, UNIT_HIDDEN, "Idle for")
    percent = [value("unit", "percentunit"), value("decimals", 0)]
    table.override_by_name("Utilization", [*percent, *panels.colored(), *panels.or_unknown()])
    idle = panels.colored((None, "text"), (60, IDLE), (policy.candidate_after, IDLE_LONG))
    table.override_by_name("Idle for", [value("unit", "s"), value("decimals", 1), *idle, *panels.or_unknown()])
    table.override_by_name("Held since", [value("unit", "dateTimeAsIso")])
    table.override_by_name("Model", [value("custom.width", 230)])
    table.override_by_name("State", panels.in_words({state: sentence(each.title) for state, each in MEANINGS.items()}))
    table.override_by_name("Node", panels.link("This node", NODE_URL))
    board.put(table, 24, 7)
    text = (
        "The command that reports its whole time, running or ended: hours used, idle and not measured, and what to "
        "change (docs/jobs.md)."
    )
    commands = [
        (queries.seen("namespace, pod"), "gpu-exporter job {{namespace}}/{{pod}}"),
        (queries.seen("job_id"), "gpu-exporter job {{job_id}}"),
    ]
    board.put(panels.texts(25, "Its report", text, commands), 24, 3)
    states = {float(number): (MEANINGS[state].title, STATES[state]) for state, number in STATE_NUMBERS.items()}
    text = "State of each of its GPUs, judged over ten minutes. A gap is time without data."
    board.put(panels.timeline(7, "State", text, queries.states(), UNIT_LEGEND, states), 24, 6)
    causes = {
        float(number): (CAUSES[cause].title, CAUSE_COLORS.get(cause, NEUTRAL))
        for cause, number in CAUSE_NUMBERS.items()
    }
    text = "Why it was in that state, as far as its host showed it (docs/causes.md). A gap is time without a cause."
    board.put(panels.timeline(17, "Cause", text, queries.causes(), UNIT_LEGEND, causes), 24, 5)
    stages = {float(number): (stage, STAGE_COLORS[stage]) for stage, number in STAGES.items()}
    text = "Stages of the holder over time, as the reconciler reported them. A gap is time without a stage."
    board.put(panels.timeline(8, "Marks", text, queries.stage(), "mark", stages), 15, 6)
    text = "The numbers behind these causes, in base units (docs/causes.md)."
    table = panels.rows(24, "Numbers", text, queries.numbers(), NUMBER_COLUMNS, NUMBER_HIDDEN, "Number")
    table.override_by_name("Value", [value("decimals", 2)])
    for column, width in NUMBER_WIDTHS.items():
        table.override_by_name(column, [value("custom.width", width)])
    board.put(table, 9, 6)
    text = "Share of time in which a kernel ran. No data on a shared GPU whose use cannot be divided among its holders."
    utilization = [(queries.own("utilization_ratio"), UNIT_LEGEND)]
    board.put(panels.graph(9, "Utilization", text, "percentunit", utilization, most=1), 12, 8)
    text = (
        "Active share of each GPU or MIG instance: streaming multiprocessors, tensor cores, memory. Hopper and newer, "
        "on whole GPUs and on MIG instances of the holder."
    )
    activity = [
        (question(name), f"{what} {{{{node}}}} GPU {{{{gpu}}}} {{{{mig}}}}")
        for what, metric in (
            ("SM", "sm_active_ratio"),
            ("tensor", "tensor_active_ratio"),
            ("memory", "dram_active_ratio"),
        )
        for question, name in ((queries.of_its_gpus, f"gpu_{metric}"), (queries.of_its_instances, f"gpu_mig_{metric}"))
    ]
    board.put(panels.graph(10, "Activity", text, "percentunit", activity, most=1), 12, 8)
    text = "Memory in use on its GPUs and MIG instances."
    board.put(panels.graph(11, "Memory", text, "bytes", [(queries.own("memory_used_bytes"), UNIT_LEGEND)]), 8, 8)
    text = "Power of its whole GPUs, and estimated power of its MIG instances."
    board.put(panels.graph(12, "Power", text, "watt", [(queries.own("power_watts"), UNIT_LEGEND)]), 8, 8)
    text = "Temperature of the boards. A board has one sensor for all of its MIG instances."
    board.put(
        panels.graph(13, "Temperature", text, "celsius", [(queries.own("temperature_celsius"), UNIT_LEGEND)]), 8, 8
    )
    board.row(18, "Training")
    text = "Steps a second, as the job's own training loop reports them (docs/torch.md). No data without a report."
    board.put(panels.graph(19, "Steps", text, "ops", [(queries.steps(), UNIT_LEGEND)]), 8, 8)
    text = (
        "Share of its steps by what the loop does, mean of its ranks: it waits for data, or is in a phase that the "
        "owner has placed. The rest is not named."
    )
    phases = [(queries.phase(name), name) for name in ("wait", *PHASES)]
    board.put(panels.stack(20, "Phases", text, "percentunit", phases), 8, 8)
    text = (
        "Share of a step for which the other ranks of a node wait for the slowest one; and beside it the utilization "
        "of the GPUs."
    )
    ranks = [(queries.late(), "late {{node}} {{cluster}}"), (queries.own("utilization_ratio"), UNIT_LEGEND)]
    board.put(panels.graph(21, "Ranks and GPUs", text, "percentunit", ranks, most=1), 8, 8)
    board.row(22, "What slows it down")
    text = "Share of time in which one of its GPUs was slowed down, by reason. The power cap is not a fault."
    board.put(panels.graph(14, "Slowed down", text, "percentunit", [(queries.throttled(), "{{reason}}")]), 8, 8)
    text = (
        "Share of its CPUs in use on each node, mean of ten minutes. Above the line, the mark is delayed. One busy CPU "
        "core delays the mark of an interactive holder too."
    )
    cpu = [(queries.whole("host_activity_ratio"), "{{node}} {{cluster}}")]
    board.put(panels.graph(15, "CPUs", text, "percentunit", cpu, limit=policy.host_busy_ratio), 8, 8)
    text = "Bytes per second to and from disks on each node, mean of ten minutes. Above the line, the mark is delayed."
    disks = [(queries.whole("host_io_bytes_per_second"), "{{node}} {{cluster}}")]
    board.put(panels.graph(16, "Disks", text, "Bps", disks, limit=policy.host_busy_io), 8, 8)
    return board.build()
