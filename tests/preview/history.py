"""A day of a small cluster for pictures: simulated nodes on a manual clock, a reconciler's dry run, and the recordings.

Only the hardware, the holders and the clock are simulated. The samples are backfilled into a real Prometheus, which then
evaluates the recording rules over the whole day, level by level.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode
from zlib import crc32

import yaml

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import Series, list_series
from gpu_exporter.agent.exposition.text import TextRenderer, escape_label
from gpu_exporter.cli.run_demo import PERIOD_MAX_S, SAMPLE_PERIOD_S, demo_settings
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.decision.outcomes import ENDED
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import SERVING, Exemption, Incarnation, Surroundings, Unreadable
from gpu_exporter.reconciler.dry_run import DryRun
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import Demand, HolderName
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.preview import Preview
from gpu_exporter.reconciler.telemetry import Telemetry
from tests.testbed.processes import fetch
from tests.testbed.simulated_node import SimulatedNode

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_S, CYCLE_S, DEMAND_S = 60, 240, 1800
TEAMS = ("vision", "ml", "speech", "serving")
PEOPLE = (("mira", "phys"), ("lea", "bio"), ("jonas", "chem"), ("noor", "phys"))
MODELS = ("H100", "H100", "A100")
WORKLOADS = ("pretrain", "finetune", "evaluate", "embed")
PRICES = {"NVIDIA H100 80GB HBM3": 3.2, "NVIDIA A100-SXM4-80GB": 1.8}  # per hour
WEEK_S = 7 * 86400
WEEK_BEFORE = 1.2  # times the idle hours of this week
WELL = {"cpus": 8, "host_cpus": 96, "host_busy": 0.3, "throttled": 0.0, "ranks": 1, "loaders": 0}
HOSTS: dict[float, dict[str, float]] = {  # what a holder does on its host, by the highest utilization for which it is so
    0.08: {**WELL, "cpus": 4, "quota": 4, "cores": 4, "throttled": 0.71, "rank_cores": 4, "runnable": 96},
    0.35: {**WELL, "cores": 1.4, "rank_cores": 0.45, "loaders": 1, "busy_loaders": 1, "full_loaders": 1,
           "loader_cores": 0.99, "loader_most": 0.99, "runnable": 2},
    0.95: {**WELL, "cores": 1.2, "rank_cores": 1.0, "runnable": 1},
}  # fmt: skip
Lines = defaultdict[str, list[str]]  # by family


def scenario(random: Random, number: int, model: str, hours: float) -> dict[str, Any]:
    """Eight GPUs, the last of which has MIG instances. Pods and jobs start, work or stay idle, and end."""
    gpus: list[dict[str, Any]] = []
    holders: list[dict[str, Any]] = []
    end = hours * 3600
    for index in range(7):
        now, points = random.uniform(0, 3600), [[0.0, 0.0]]
        while now < end:
            until = now + random.uniform(2, 9) * 3600  # some hold GPUs beyond the end of the picture
            name, kind = f"{random.choice(TEAMS)}/run-{random.randrange(1000)}/main", "pod"
            holder: dict[str, Any] = {
                "gpu": index,
                "from": now,
                "to": until,
                "kind": kind,
                "name": name,
                "processes": 1,
            }
            if random.random() < 0.5:
                user, account = random.choice(PEOPLE)
                holder |= {
                    "kind": "job",
                    "name": str(random.randrange(40_000, 50_000)),
                    "user": user,
                    "account": account,
                    "partition": model.lower(),
                }
            holders.append(holder | {"memory_gib": random.randrange(4, 40)})
            level = random.choice((0.95, 0.9, 0.7, 0.35, 0.08))
            wait = 0.04 if level >= 0.7 else 0.58
            holders[-1]["host"] = [{"at": 0, **HOSTS[min(each for each in HOSTS if each >= level)]}]
            holders[-1]["training"] = {"step": 0.38, "wait": wait, "workers": 4, "batch_size": 64}
            stops = until if random.random() < 0.5 else random.uniform(now, until)  # some stop working earlier
            points += (
                [[now + 60, 0.0], [now + 300, level], [stops - 1, level], [stops, 0.0]] if stops > now + 400 else []
            )
            now = until + random.uniform(0, 2) * 3600
        points = sorted(points)
        gpus.append(
            {
                "model": model,
                "load": {
                    "kind": "curve",
                    "points": [p for i, p in enumerate(points) if not i or p[0] > points[i - 1][0]],
                },
                "throttle": [{"reason": "hw_thermal", "share": 0.3}] if index == 3 else [],
            }
        )
    parts = ("3g.40gb", "2g.20gb", "1g.10gb") if model == "H100" else ("3g.20gb", "2g.10gb", "1g.5gb")
    loads = (
        {"kind": "square", "high": 0.6, "period": 5400},
        {"kind": "constant", "value": 0.0},
        {"kind": "constant", "value": 0.3},
    )
    gpus.append(
        {"model": model, "mig": [{"profile": part, "load": load} for part, load in zip(parts, loads, strict=True)]}
    )
    holders += [
        {"gpu": 7, "mig": 0, "kind": "pod", "name": f"serving/ranker-7d9c{number}/server", "memory_gib": 12},
        {"gpu": 7, "mig": 1, "kind": "pod", "name": f"serving/embedder-5b8f{number}/server", "memory_gib": 6},
    ]
    return {"gpus": gpus, "holders": holders}


class Site:
    """The live objects of the day: servers serve, some pods are exempt, and some controllers are unreadable."""

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        return {name: self._around(name) for name in names}

    def _around(self, name: HolderName) -> Surroundings | Unreadable:
        if name.namespace == "serving":
            return Surroundings(kind=SERVING, kind_why="a Service selects it")
        lot = crc32(name.name.encode()) % 8
        if lot == 0:
            return Unreadable("its controller cannot be read", reason="forbidden", kind="Workflow")
        return Surroundings(exemption=Exemption("pod", "its owner asked to keep it") if lot == 1 else None)

    def find_living(self, holders: Collection[Incarnation]) -> set[Incarnation]:
        return set()

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        return ENDED


def write_day(path: Path, end: int, hours: int, seed: int = 7) -> None:
    """OpenMetrics text of all scrapes of Prometheus until `end` (Unix seconds)."""
    random = Random(seed)
    nodes = {
        f"gpu-node-{i + 1}": SimulatedNode(
            parse_scenario(scenario(random, i, model, hours)),
            demo_settings(),
            sample_period_s=SAMPLE_PERIOD_S,
            driver_period_max_s=PERIOD_MAX_S,
        )
        for i, model in enumerate(MODELS)
    }
    begin = end - hours * 3600
    lines: Lines = defaultdict(list)
    pages: dict[str, str] = {}
    clock = ManualClock(wall=float(begin))
    telemetry = Telemetry(clock)
    source = ExporterSource(
        [parse_exporter(name) for name in nodes], 7200.0, clock, lambda address: pages[address.place]
    )
    settings = demo_settings()
    book = Rulebook(settings.policy)
    record = Record(None, telemetry, clock, settings.actions.shadow_for)
    judge = Judge(source, lambda _: Site(), book, record=record)
    dry = DryRun(judge, settings.policy, telemetry, Preview({}), clock)
    for node in nodes.values():
        node.clock.step_wall(begin - node.clock.wall())
    text = TextRenderer()
    for second in range(SCRAPE_S, hours * 3600 + 1, SCRAPE_S):
        at = begin + second
        clock.advance(SCRAPE_S)
        pods = set[tuple[str, str]]()
        if second % DEMAND_S == SCRAPE_S:
            pending = {"h100": random.choice((0.0, 0.0, 2.0, 4.0, 8.0)), "a100": 0.0}
            telemetry.note_demand(Demand(pending, pending))
        for name, node in nodes.items():
            view = node.run(SCRAPE_S)
            take(lines, {"job": "gpu-exporter", "node": name, "instance": name}, list_series(view), at)
            holders = [each.allocation.holder for each in view.allocations]
            pods |= {(holder.namespace, holder.pod) for holder in holders if holder.pod}
            if second % CYCLE_S == 0:
                pages[name] = text.render(list_series(view))
        note_site(lines, pods, at)
        if second >= CYCLE_S:
            if second % CYCLE_S == 0:
                dry.run()
            for family in telemetry.registry.collect():
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        labels = {"job": "gpu-exporter-reconciler", "instance": "reconciler", **sample.labels}
                        lines[sample.name].append(line(sample.name, labels, sample.value, at))
    path.write_text("\n".join(each for name in sorted(lines) for each in lines[name]) + "\n# EOF\n", "utf-8")


def note_site(lines: Lines, pods: Iterable[tuple[str, str]], at: int) -> None:
    """Series of the site's and kube-prometheus' rules: prices, and the owners of pods."""
    for name, price in PRICES.items():
        lines["model:gpu_price:per_hour"].append(line("model:gpu_price:per_hour", {"name": name}, price, at))
    owned = "namespace_workload_pod:kube_pod_owner:relabel"
    for namespace, pod in sorted(pods):
        kind = pod.rpartition("-")[0] if namespace == "serving" else WORKLOADS[crc32(pod.encode()) % len(WORKLOADS)]
        owner = {"namespace": namespace, "pod": pod, "workload": kind, "workload_type": "job"}
        lines[owned].append(line(owned, owner, 1, at))


def take(lines: Lines, target: Mapping[str, str], page: Sequence[Series], at: int) -> None:
    """One scrape."""
    for family, names, rows in page:
        for values, value in rows:
            labels = {**target, **dict(zip(names, values, strict=True))}
            if labels.get("pod") and "resource" in labels:
                labels["resource"] = "nvidia.com/gpu"  # simulated pods do not report it
            lines[family.name].append(line(family.name, labels, value, at))


def write_week_before(path: Path, url: str, start: int, end: int) -> None:
    """Recordings of tenants for the week before, similar to this week but with more idle hours."""
    name = "tenant:gpu_gpus:rate5m"
    form = urlencode({"query": name, "start": start, "end": end, "step": SCRAPE_S})
    rows = json.loads(fetch(f"{url}/api/v1/query_range?{form}") or "{}")["data"]["result"]
    lines = [
        line(name, {key: each for key, each in row["metric"].items() if key != "__name__"}, value, int(at) - WEEK_S)
        for row in rows
        for at, value in ((at, WEEK_BEFORE * float(text)) for at, text in row["values"])
    ]
    path.write_text("\n".join(lines) + "\n# EOF\n", "utf-8")


def line(name: str, labels: Mapping[str, str], value: float, at: int) -> str:
    text = ",".join(f'{key}="{escape_label(each)}"' for key, each in labels.items() if each)
    return f"{name}{{{text}}} {value!r} {at}"


def levels(files: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """The recording rules by level. Rules that read no other recording come first."""
    rules = [
        rule
        for path in files
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
        for rule in group["rules"]
        if "record" in rule
    ]
    left, found, done = rules, [], set[str]()
    while left:
        waits = {rule["record"] for rule in left}
        ready = [
            rule for rule in left if not waits & set(re.findall(r"[a-z_]+:\w+:\w+", rule["expr"])) - {rule["record"]}
        ]
        assert ready, f"recordings that wait for each other: {sorted(waits)}"
        found.append(ready)
        done |= {rule["record"] for rule in ready}
        left = [rule for rule in left if rule not in ready]
    return found


def record(url: str, data: Path, rules: Sequence[Mapping[str, Any]], start: int, end: int) -> None:
    """Write blocks with the results of these rules over this time."""
    path = data.parent / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "level", "interval": "1m", "rules": list(rules)}]}), "utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "rules", f"--start={start}", f"--end={end}", f"--url={url}"]
    subprocess.run([*command, f"--output-dir={data}", "--eval-interval=1m", str(path)], check=True, capture_output=True)


def load(path: Path, data: Path) -> None:
    """Write blocks from OpenMetrics text."""
    command = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "--max-block-duration=48h",
        "openmetrics",
        str(path),
        str(data),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
