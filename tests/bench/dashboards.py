"""What each panel costs a real Prometheus that holds a day of a site of a given size: seconds, samples read, series.

    python -m tests.bench.dashboards [--nodes 250] [--hours 24]

The recordings that the fleet reads are there for each minute; of the rest there is what a panel reads of the present.
DESIGN asks for at most 2 s and 50 million samples a panel over a day, 50 ms for an instant query that is read often, and a
few hundred series a panel.
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
from typing import Any

from tests.bench.rules import write_history
from tests.testbed.processes import Processes, fetch
from tests.testbed.servers import Prometheus

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"$__rate_interval": "2m", "$namespace": ".*", **dict.fromkeys(("$cluster", "$account", "$job"), ".*")}
PARTS = ("used", "idle_short", "idle_long", "unknown")


def recordings(nodes: int, start: int, end: int) -> Iterator[tuple[str, str, range]]:
    """Name, labels and times of what is read over the whole range, and of what is read now."""
    day, now = range(start, end + 1, 60), range(end - 60, end + 1, 60)
    for node in range(nodes):
        who = f'scheduler="slurm",account="a{node % 40}",partition="p{node % 7}"'
        who = who if node % 2 else f'scheduler="kubernetes",namespace="team-{node % 97}"'
        for part in PARTS:
            yield "namespace:gpu_gpus:sum", f'{who},node_pool="p{node % 7}",name="H100",part="{part}"', day
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
    for le in ("0", "0.1", "0.25", "0.5", "0.75", "0.9", "1"):
        yield "cluster:gpu_utilization:bucket", f'le="{le}"', day
    for i in range(nodes * 8):
        holder = f'scheduler="slurm",job_id="{4_000_000 + i}"'
        key = f'node="n{i // 8}",uuid="GPU-{i // 8:05d}-{i % 8}",{holder}'
        yield "allocation:owner:info", f'{holder},user="u{i % 500}",account="a{i % 40}"', now
        yield "unit:gpu_utilization:ratio5m", f'node="n{i // 8}",uuid="GPU-{i // 8:05d}-{i % 8}"', now
        for name in ("gpu_share:ratio", "gpu_idle_run_seconds:known", "gpu_start_timestamp_seconds:max"):
            yield f"allocation:{name}", key, now


def write(path: Path, nodes: int, start: int, end: int) -> None:
    """OpenMetrics text, a family in one piece."""
    lines: dict[str, list[str]] = {}
    for name, labels, times in recordings(nodes, start, end):
        lines.setdefault(name, []).extend(f"{name}{{{labels}}} {1 + at % 7} {at}" for at in times)
    path.write_text("\n".join(each for rows in lines.values() for each in rows) + "\n# EOF\n", encoding="utf-8")


def ask(
    url: str, target: dict[str, Any], start: int, end: int, width: int, chosen: dict[str, str]
) -> tuple[float, int, int]:
    """Seconds, samples read, and series of one target, as Grafana asks for it in a panel so many pixels wide."""
    expression = target["expr"]
    for name, value in sorted(
        {**VARIABLES, "$__range": f"{end - start}s", **chosen}.items(), key=lambda pair: -len(pair[0])
    ):
        expression = expression.replace(name, value)
    form: dict[str, Any] = {"query": expression, "stats": "all"}
    step = max(60, -(-(end - start) // width // 60) * 60)
    kind = "query" if target.get("instant") else "query_range"
    form |= {"time": end} if kind == "query" else {"start": start, "end": end, "step": step}
    began = time.monotonic()
    answer = json.loads(fetch(f"{url}/api/v1/{kind}?{urllib.parse.urlencode(form)}", timeout_s=120) or "{}")
    took = time.monotonic() - began
    data = answer["data"]
    return took, data["stats"]["samples"]["totalQueryableSamples"], len(data["result"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=250)
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        directory = Path(name)
        end = int(time.time()) // 60 * 60
        start = end - options.hours * 3600
        data = directory / "prometheus" / "data"
        import_ = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=48h", "openmetrics"]
        write(directory / "recorded.txt", options.nodes, start, end)
        write_history(directory / "raw.txt", options.nodes, 2, end)
        for text in ("recorded.txt", "raw.txt"):
            subprocess.run([*import_, str(directory / text), str(data)], check=True, stdout=subprocess.DEVNULL)
        prometheus = Prometheus(processes, directory / "prometheus", {}, flags=("--query.lookback-delta=30m",))
        print(f"{options.nodes * 8} GPUs, {options.hours} h\n{'s':>7} {'M samples':>10} {'series':>7}  panel")
        for board, chosen in (
            ("fleet", {}),
            ("holder", {"$namespace": "team-0", "$pod": "train-000000", "$jobid": "", "$node": ".*"}),
            ("node", {"$node": "n1"}),
            ("operations", {"$node": ".*"}),
        ):
            dashboard = json.loads((ROOT / "grafana" / "dashboards" / f"gpu-{board}.json").read_text("utf-8"))
            for panel in dashboard["panels"]:
                width = panel["gridPos"]["w"] * 66
                costs = [ask(prometheus.url, target, start, end, width, chosen) for target in panel.get("targets", [])]
                if costs:
                    seconds, samples, series = (sum(column) for column in zip(*costs, strict=True))
                    print(f"{seconds:7.3f} {samples / 1e6:10.3f} {series:7}  {board}: {panel['title']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
