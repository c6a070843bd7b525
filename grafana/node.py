"""The dashboard of nodes and GPUs: all of the cluster's GPUs by utilization, the nodes, and the GPUs of one node."""

from __future__ import annotations

from grafana.panels import FREE, IDLE, IDLE_LONG, USED, Board, value
from grafana.queries import CLUSTER, RAW, Node, alerts_of
from grafana_foundation_sdk.models import dashboard as models

from gpu_exporter.common.config.defaults import Settings
from grafana import panels

UID = "gpu-exporter-node"
GPU = "{{gpu}}"
NODE_COLUMNS = {
    "cluster": "Cluster",
    "node": "Node",
    "Value #gpus": "GPUs",
    "Value #answer": "Answering",
    "Value #held": "Held",
    "Value #utilization": "Utilization",
    "Value #power": "Power",
    "Value #temperature": "Hottest",
}
NODE_URL = "/d/gpu-exporter-node?var-datasource=${datasource}&${cluster:queryparam}&var-node=${__value.raw}"
HEAT = "Temperature of the GPU, and of its memory if it has a sensor."
HEALTH_COLUMNS = {
    "node": "Node",
    "gpu": "GPU",
    "name": "Model",
    "driver_version": "Driver",
    "Value #up": "Answers",
    "Value #action": "Recovery action",
    "Value #uncorrected": "ECC errors",
    "Value #unusable": "Unusable",
    "Value #degraded": "Degraded",
    "Value #replays": "Replays",
    "Value #margin": "Margin",
}
INSTANCE_COLUMNS = {
    "node": "Node",
    "gpu": "GPU",
    "mig": "MIG",
    "profile": "Profile",
    "holder": "Holder",
    "Value #activity": "Activity",
    "Value #memory": "Memory",
    "Value #power": "Power",
    "Value #free": "Free share of its GPU",
}
MARGIN = "Degrees left before the GPU slows down."
INSTANCE_HIDDEN = ("Time", "cluster", "uuid", "mig_uuid", "Value #info")
# nvmlDeviceGetFieldValues, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: nvmlDeviceGpuRecoveryAction_t of nvml.h
ACTIONS = ("none", "reset the GPU", "reboot the node", "drain peers", "drain and reset")


def build(settings: Settings) -> models.Dashboard:
    """The whole dashboard with the windows of these settings."""
    queries = Node()

    def _of(name: str) -> panels.Query:
        return queries.gauge(name), f"GPU {GPU}"

    board = Board(UID, "GPUs: nodes and hardware", "State of the hardware, and activity of each GPU.", "now-3h", "1m")
    board.variable("cluster", "Cluster", "label_values(gpu_exporter_build_info, cluster)")
    board.variable("job", "Scrape job", f"label_values(gpu_exporter_build_info{{{CLUSTER}}}, job)")
    board.variable("node", "Node", f"label_values(gpu_exporter_build_info{{{RAW}}}, node)", one=True)
    board.annotate("Alerts", alerts_of(f'{CLUSTER}, node=~"$node"'), IDLE_LONG)
    text = "GPUs of the cluster that answer."
    board.put(panels.number(1, "GPUs that answer", text, queries.answering()), 4, 4)
    text = "GPUs of the cluster that should answer, but do not."
    board.put(panels.number(2, "Lost", text, queries.lost(), alarm=1), 4, 4)
    text = "GPUs of the cluster that have a holder. A MIG instance or a shared GPU counts by its share."
    board.put(panels.number(3, "Held", text, queries.held(), decimals=1), 4, 4)
    text = "XID errors of the cluster in the range, by class: application, hardware, and information."
    xids = panels.number(4, "XID errors", text, queries.xids(), alarm=1)
    board.put(xids, 12, 4)
    text = (
        "Number of GPUs of the cluster by utilization, mean of five minutes. Dark at 0 % means waste, dark at 100 % "
        "means work. GPUs in MIG mode have no utilization as a whole."
    )
    board.put(panels.heat_map(5, "All GPUs by utilization", text, queries.distribution()), 12, 10)
    text = "Current values of the nodes. Click on a node to show its GPUs below."
    table = panels.rows(6, "Nodes", text, queries.nodes(), NODE_COLUMNS, ("Time",), "Utilization")
    percent = [value("unit", "percentunit"), value("decimals", 0)]
    table.override_by_name("Utilization", [*percent, *panels.colored(), *panels.or_unknown()])
    table.override_by_name("Power", [value("unit", "watt"), value("decimals", 0)])
    table.override_by_name("Hottest", [value("unit", "celsius"), value("decimals", 0)])
    table.override_by_name("Held", [value("decimals", 1), *panels.or_unknown()])
    table.override_by_name("Node", panels.link("This node", NODE_URL))
    for name in ("GPUs", "Answering", "Held", "Utilization", "Power", "Hottest"):
        table.override_by_name(name, [value("custom.width", 95)])
    board.put(table, 12, 10)
    board.row(7, "GPUs of the chosen node")
    text = "Holders of each GPU or MIG instance. A gap is a free GPU, or time without data."
    held = {1.0: ("held", USED)}
    board.put(panels.timeline(8, "Holders", text, queries.holders(), "GPU {{gpu}} {{mig}}: {{holder}}", held), 24, 12)
    share, celsius, both = "percentunit", "celsius", (("in", "rx"), ("out", "tx"))
    memory_heat = (queries.gauge("gpu_memory_temperature_celsius"), f"memory {GPU}")
    active = [
        (queries.gauge("gpu_sm_active_ratio"), f"SM {GPU}"),
        (queries.gauge("gpu_tensor_active_ratio"), f"tensor {GPU}"),
    ]
    memory = [
        (queries.gauge("gpu_dram_active_ratio"), f"GPM {GPU}"),
        (queries.gauge("gpu_memory_busy_ratio"), f"driver {GPU}"),
    ]
    video = [
        (queries.gauge("gpu_encoder_utilization_ratio"), f"encoder {GPU}"),
        (queries.gauge("gpu_decoder_utilization_ratio"), f"decoder {GPU}"),
    ]
    pcie, nvlink = (
        [(queries.rate(f"gpu_{bus}_{name}_bytes_total"), f"{way} {GPU}") for way, name in both]
        for bus in ("pcie", "nvlink")
    )
    slowed = "Share of time in which the GPU was slowed down, by reason. The power cap is not a fault."
    for id_, title, text, unit, questions, most in (
        (9, "Utilization", "Share of time in which a kernel ran.", share, [_of("gpu_utilization_ratio")], 1),
        (10, "Activity", "Active share of the GPU. Hopper and newer.", share, active, 1),
        (11, "Memory", "Used share of the memory of each GPU.", share, [(queries.memory(), f"GPU {GPU}")], 1),
        (12, "Power", "Power as a share of the GPU's limit.", share, [(queries.power_share(), f"GPU {GPU}")], None),
        (13, "Temperature", HEAT, celsius, [_of("gpu_temperature_celsius"), memory_heat], None),
        (
            14,
            "Margin",
            "Degrees left before the GPU slows down.",
            celsius,
            [_of("gpu_temperature_margin_celsius")],
            None,
        ),
        (15, "SM clock", "Clock of the streaming multiprocessors.", "hertz", [_of("gpu_sm_clock_hertz")], None),
        (16, "Slowed down", slowed, share, [(queries.throttled(), f"GPU {GPU} {{{{reason}}}}")], None),
        (17, "PCIe", "Bytes per second over PCIe, in and out.", "Bps", pcie, None),
        (18, "NVLink", "Bytes per second over NVLink, in and out.", "Bps", nvlink, None),
        (21, "Memory activity", "Share of time in which the memory was read or written.", share, memory, 1),
        (22, "Video engines", "Utilization of the video encoders and decoders.", share, video, 1),
    ):
        board.put(panels.graph(id_, title, text, unit, questions, most=most), 8, 8)
    text = (
        "Faults that the driver reports for each GPU. ECC errors: uncorrected errors. Recovery action: the action that "
        "the driver asks for. Unusable, degraded: 1 with such a condition (gpu_condition). Margin: degrees left "
        "before the GPU slows down. Replays: PCIe replays in the range."
    )
    table = panels.rows(19, "Health", text, queries.health(), HEALTH_COLUMNS, ("Time", "cluster", "uuid"), "ECC errors")
    answers = {
        "1": models.ValueMappingResult(text="yes", color=USED),
        "0": models.ValueMappingResult(text="no", color=IDLE_LONG),
    }
    table.override_by_name("Answers", [*panels.colored(), value("mappings", [models.ValueMap(answers)])])
    actions = {
        str(number): models.ValueMappingResult(text=text, color=IDLE_LONG if number else FREE)
        for number, text in enumerate(ACTIONS)
    }
    table.override_by_name("Recovery action", [*panels.colored(), value("mappings", [models.ValueMap(actions)])])
    for name in ("ECC errors", "Unusable", "Degraded", "Replays"):
        table.override_by_name(name, panels.colored((None, "text"), (1, IDLE_LONG)))
    table.override_by_name(
        "Margin", [value("unit", "celsius"), *panels.colored((None, IDLE_LONG), (5, IDLE), (10, "text"))]
    )
    board.put(table, 24, 11)
    text = (
        "Current values of MIG instances. Power is an estimate: a board has one sensor for all of its instances. Free "
        "share of its GPU: the part without a holder, by slices."
    )
    table = panels.rows(
        20,
        "MIG instances",
        text,
        queries.instances(),
        INSTANCE_COLUMNS,
        ("Time", "cluster", "uuid", "mig_uuid", "Value #info"),
        "Activity",
    )
    table.override_by_name("Activity", [*percent, *panels.colored(), *panels.or_unknown()])
    table.override_by_name("Memory", [value("unit", "bytes")])
    table.override_by_name("Free share of its GPU", percent)
    table.override_by_name("Power", [value("unit", "watt"), value("decimals", 0)])
    board.put(table, 24, 8)
    return board.build()
