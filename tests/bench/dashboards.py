"""The cost of each panel on a real Prometheus with a day of data of a site: CPU, samples read, series.

    python -m tests.bench.dashboards [--nodes 250] [--hours 24]

The data are the recordings that the fleet dashboard reads and all series of one node, both for every minute; and
of all other nodes the series that a panel reads for the present. DESIGN requires at most 2 s and 50 million samples per
panel over a day, and a few hundred series; tests/component/test_grafana.py checks this for the panels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.text import escape_label
from tests.bench.rules import write_history
from tests.testbed.processes import Processes, cpu_s, fetch
from tests.testbed.servers import Prometheus
from tests.testbed.simulated_node import SimulatedNode

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"$__rate_interval": "2m", "$namespace": ".*", **dict.fromkeys(("$cluster", "$account", "$job"), ".*")}
PARTS = ("used", "idle_short", "idle_long", "unknown")
WHOLE = "n-whole"  # the node with all of its series over the whole time
HELD = {  # recordings of each allocation, and when they are read
    "gpu_share:ratio": "day",
    "gpu_coverage:ratio30m": "day",
    "gpu_idle_run_seconds:known": "now",
    "gpu_start_timestamp_seconds:max": "now",
}
BUSY = {"kind": "square", "high": 0.9, "period": 300}
CHOSEN = {  # variables of each dashboard
    "fleet": {},
    "holder": {"$namespace": "team-0", "$pod": "whole-0", "$jobid": "", "$node": WHOLE},
    "node": {"$node": WHOLE},
    "operations": {"$node": ".*"},
}


class Cost(NamedTuple):
    """The cost of one panel: seconds of CPU, samples that its queries read, and series that they returned."""

    board: str
    title: str
    seconds: float
    samples: int
    series: int


def recordings(nodes: int, start: int, end: int) -> Iterator[tuple[str, str, range]]:
    """Name, labels and times of the series that are read over the whole range, and of those read for the present."""
    day, now = range(start, end + 1, 60), range(end - 60, end + 1, 60)
    seldom = range(start, end + 1, 600)  # enough for series that are read at one moment, with the lookback below
    for node in range(nodes):
        who = f'scheduler="slurm",account="a{node % 40}",partition="p{node % 7}"'
        who = who if node % 2 else f'scheduler="kubernetes",namespace="team-{node % 97}"'
        for part in PARTS:
            yield (
                "namespace:gpu_gpus:sum",
                f'{who},node_pool="p{node % 7}",name="model-{node // 280}",part="{part}"',
                day,
            )
    for user in range(min(500, nodes * 8)):
        for part in ("used", "idle", "unknown"):
            yield (
                "tenant:gpu_gpus:rate5m",
                f'scheduler="slurm",account="a{user % 40}",user="u{user}",part="{part}"',
                day,
            )
            yield "tenant:gpu_cost:rate", f'scheduler="slurm",account="a{user % 40}",user="u{user}",part="{part}"', day
    for namespace in range(min(97, nodes)):
        for part in ("used", "idle", "unknown"):
            yield "tenant:gpu_gpus:rate5m", f'scheduler="kubernetes",namespace="team-{namespace}",part="{part}"', day
    for name in ("pool:gpu_idle_gpus:sum", "pool:gpu_pending_gpus:sum"):
        for pool in range(7):
            yield name, f'pool="p{pool}"', day
    for workload in range(min(300, nodes * 2)):
        yield "workload:gpu_idle_gpus:sum", f'namespace="team-{workload % 97}",workload="w{workload}"', day
    for le in ("0", "0.1", "0.25", "0.5", "0.75", "0.9", "1"):
        yield "cluster:gpu_utilization:bucket", f'le="{le}"', day
    for i in range(nodes * 8):
        holder = f'scheduler="slurm",job_id="{4_000_000 + i}"'
        key = f'node="n{i // 8}",uuid="GPU-{i // 8:05d}-{i % 8}",{holder}'
        yield "allocation:owner:info", f'{holder},user="u{i % 500}",account="a{i % 40}"', now
        yield "unit:gpu_utilization:ratio5m", f'node="n{i // 8}",uuid="GPU-{i // 8:05d}-{i % 8}"', now
        for name, times in HELD.items():
            yield f"allocation:{name}", key, seldom if times == "day" else now
    yield from whole_node(day)


def whole_node(day: range) -> Iterator[tuple[str, str, range]]:
    """Every series of eight GPUs, each held by its own pod; the first pod holds MIG instances."""
    parts = [{"profile": "1g.10gb", "load": BUSY}] * 7
    gpus: list[dict[str, Any]] = [{"model": "H100", "mig": parts}, *({"model": "H100", "load": BUSY} for _ in range(7))]
    holders = [{"gpu": 0, "mig": part, "kind": "pod", "name": "team-0/whole-0/main"} for part in range(7)]
    holders += [{"gpu": gpu, "kind": "pod", "name": f"team-0/whole-{gpu}/main"} for gpu in range(1, 8)]
    view = SimulatedNode(parse_scenario({"gpus": gpus, "holders": holders})).run(900)
    for family, names, rows in list_series(view):
        for values, _ in rows:
            labels = {"job": "gpu-exporter", "node": WHOLE, "instance": WHOLE, **dict(zip(names, values, strict=True))}
            yield family.name, ",".join(f'{key}="{escape_label(each)}"' for key, each in labels.items() if each), day


def write(path: Path, nodes: int, start: int, end: int) -> None:
    """Write OpenMetrics text, with all rows of a family together."""
    lines: dict[str, list[str]] = {}
    for name, labels, times in recordings(nodes, start, end):
        lines.setdefault(name, []).extend(f"{name}{{{labels}}} {1 + at % 7} {at}" for at in times)
    path.write_text("\n".join(each for rows in lines.values() for each in rows) + "\n# EOF\n", encoding="utf-8")


def ask(
    prometheus: Prometheus, target: dict[str, Any], start: int, end: int, width: int, chosen: dict[str, str]
) -> tuple[float, int, int]:
    """Seconds of the server's CPU, samples read, and series of one target, queried as for a panel of `width` pixels."""
    expression = target["expr"]
    for name, value in sorted(
        {**VARIABLES, "$__range": f"{end - start}s", **chosen}.items(), key=lambda pair: -len(pair[0])
    ):
        expression = expression.replace(name, value)
    form: dict[str, Any] = {"query": expression, "stats": "all"}
    step = max(60, -(-(end - start) // width // 60) * 60)
    kind = "query" if target.get("instant") else "query_range"
    form |= {"time": end} if kind == "query" else {"start": start, "end": end, "step": step}
    server = prometheus.running.process.pid
    began = cpu_s(server)  # CPU time does not depend on other load of the machine
    answer = json.loads(fetch(f"{prometheus.url}/api/v1/{kind}?{urllib.parse.urlencode(form)}", timeout_s=120) or "{}")
    data = answer["data"]
    return cpu_s(server) - began, data["stats"]["samples"]["totalQueryableSamples"], len(data["result"])


def measure(directory: Path, nodes: int, hours: int) -> Iterator[Cost]:
    """Measure each panel once, on a separate Prometheus."""
    end = int(time.time()) // 60 * 60
    start = end - hours * 3600
    data = directory / "prometheus" / "data"
    import_ = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=48h", "openmetrics"]
    write(directory / "recorded.txt", nodes, start, end)
    write_history(directory / "raw.txt", nodes, 2, end)
    for text in ("recorded.txt", "raw.txt"):
        subprocess.run([*import_, str(directory / text), str(data)], check=True, stdout=subprocess.DEVNULL)
    with Processes(directory) as processes:
        prometheus = Prometheus(processes, directory / "prometheus", {}, flags=("--query.lookback-delta=30m",))
        for board, chosen in CHOSEN.items():
            dashboard = json.loads((ROOT / "grafana" / "dashboards" / f"gpu-{board}.json").read_text("utf-8"))
            for panel in dashboard["panels"]:
                width = panel["gridPos"]["w"] * 66
                costs = [ask(prometheus, target, start, end, width, chosen) for target in panel.get("targets", [])]
                if costs:
                    seconds, samples, series = zip(*costs, strict=True)
                    yield Cost(board, panel["title"], sum(seconds), sum(samples), sum(series))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=250)
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(
            f"{options.nodes * 8} GPUs, {options.hours} h\n{'CPU s':>7} {'M samples':>10} {'series':>7}  panel",
            flush=True,
        )
        for cost in measure(Path(name), options.nodes, options.hours):
            print(f"{cost.seconds:7.3f} {cost.samples / 1e6:10.3f} {cost.series:7}  {cost.board}: {cost.title}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
