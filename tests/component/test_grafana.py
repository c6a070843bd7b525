"""The dashboards' queries against a real Prometheus that scrapes a simulated node with known values."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from grafana.queries import STATE_NUMBERS, Fleet, Holder, Node, Operations

from gpu_exporter.common.config.defaults import Settings
from tests.bench.dashboards import measure
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, fetch, free_port, wait_for
from tests.testbed.servers import Prometheus, require

ROOT = Path(__file__).resolve().parents[2]
IDLE_FOR_S, WINDOW_S = 6, 5
SCRAPES = 12  # one a second
VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "15s",
    **dict.fromkeys(("$cluster", "$node", "$account", "$job"), ".*"),
}
ALL = {"$namespace": ".*"}
# Seven GPUs: busy pod, idle job, pod whose GPU reports no utilization, MIG (busy pod, idle pod, free), free, job whose
# GPU is lost, busy job.
MUTE = [
    {"at": 0, "call": call, "error": "NVML_ERROR_UNKNOWN"}
    for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples")
]
BUSY: dict[str, object] = {"kind": "constant", "value": 0.8}
IDLE: dict[str, object] = {"kind": "constant", "value": 0}
SCENARIO = {
    "gpus": [
        {"model": "H100", "load": BUSY},
        {"model": "H100", "load": IDLE},
        {"model": "H100", "load": IDLE, "faults": MUTE},
        {
            "model": "H100",
            "mig": [
                {"profile": "3g.40gb", "load": BUSY},
                {"profile": "2g.20gb", "load": IDLE},
                {"profile": "1g.10gb", "load": IDLE},
            ],
        },
        {"model": "H100", "load": IDLE},
        {"model": "H100", "load": IDLE, "faults": [{"at": 9, "error": "NVML_ERROR_GPU_IS_LOST"}]},
        {"model": "H100", "load": BUSY},
    ],
    "holders": [
        {"gpu": 0, "kind": "pod", "name": "vision/train-0/main"},
        {"gpu": 1, "kind": "job", "name": "48113", "user": "mira", "account": "phys"},
        {"gpu": 2, "kind": "pod", "name": "ml/mute-0/main"},
        {"gpu": 3, "mig": 0, "kind": "pod", "name": "serving/ranker-7/server"},
        {"gpu": 3, "mig": 1, "kind": "pod", "name": "serving/embedder-1/server"},
        {"gpu": 5, "kind": "job", "name": "48200", "user": "lea", "account": "bio"},
        {"gpu": 6, "kind": "job", "name": "48090", "user": "jonas"},
    ],
}
BUILT = ("fleet", "holder", "node", "operations")
FLEET = {  # of seven GPUs
    "Held": 5 + 3 / 7 + 2 / 7,
    "Used": 2 + 3 / 7,
    f"Idle under {IDLE_FOR_S}s": 0.0,
    f"Idle {IDLE_FOR_S}s or more": 1 + 2 / 7,
    "Stalled": 0.0,
    "Use unknown": 2.0,
    "Free": 1 + 2 / 7,
    "Outside": 0.0,
    "No data": 0.0,
}
EMPTY = {  # queries without data here, and the reason
    ("fleet", "GPUs waited for, and GPUs held idle", "A"): "no pod or job waits for a GPU",
    ("fleet", "A week before", "A"): "there was no week before",
    ("fleet", "Idle GPU-hours by workload", "A"): "kube-state-metrics says who owns pods, and does not run",
    ("fleet", "Cost of idle hours", "A"): "the site has given no prices",
    ("fleet", "GPU-hours by namespace, account and user", "cost"): "the site has given no prices",
    **{
        ("fleet", "Candidates for a smaller GPU", name): "no holder has held a GPU for a day"
        for name in ("hours", "mean", "peak", "model")
    },
    **{("holder", "Activity", ref): "it holds no MIG instance" for ref in "BDF"},
    **{
        ("holder", title, ref): "its training is not observed; that of tests/preview is"
        for title, refs in (("Steps", "A"), ("Phases", "ABCDEFGHI"), ("Ranks and GPUs", "A"))
        for ref in refs
    },
    **{
        ("fleet", "Why GPUs are not used, and what to change", name): "hosts are not read; those of tests/preview are"
        for name in ("hours", "gpus")
    },
    ("holder", "Its report", "B"): "it is a pod",
    ("holder", "Cause", "A"): "it works",
    ("holder", "Why, and what to change", "why"): "it works",
    ("holder", "Numbers", "number"): "it works",
    ("holder", "Mark", "A"): "it works",
    ("holder", "Marks", "A"): "it works",
    **{("holder", title, "A"): "the host of a simulated node is not read" for title in ("CPUs", "CPU cores", "Disks")},
    ("holder", "Slowed down", "A"): "its GPU is not slowed down",
    ("node", "Slowed down", "A"): "no GPU is slowed down",
    ("node", "Health", "degraded"): "no GPU is degraded",
    ("operations", "Age of the state file", "A"): "there is no state directory",
    ("operations", "Regret", "A"): "no holder worked again",
    ("operations", "Actions", "A"): "actions are off",
    ("operations", "Actions held back", "A"): "actions are off",
    ("operations", "Idle, but not taken back", "A"): "every holder that is idle for long enough is underused",
    ("operations", "Unreadable objects", "A"): "live objects are not read",
}

pytestmark = pytest.mark.servers

Rows = list[tuple[dict[str, str], float]]


def ask(prometheus: Prometheus, expression: str, at: float, chosen: Mapping[str, str] = ALL) -> Rows:
    """An instant query, with the variables filled in as Grafana does. Fails if the server refuses the query, and at NaN."""
    filled = {**VARIABLES, **chosen}
    for variable in sorted(filled, key=len, reverse=True):
        expression = expression.replace(variable, filled[variable])
    assert "$" not in expression.replace("job $1", "")
    rows = prometheus.query(expression, at)
    assert all(value == value for _, value in rows), f"NaN in the answer to {expression}"
    return rows


def one(rows: Rows) -> float:
    """The value of an answer with exactly one number."""
    ((labels, value),) = rows
    assert labels == {}
    return value


class Site(NamedTuple):
    """The servers, the panels by dashboard and title, and a moment whose data are complete."""

    prometheus: Prometheus
    exporter: Running
    panels: dict[str, dict[str, Any]]
    now: float

    def expressions(self, board: str) -> dict[tuple[str, str, str], str]:
        return {
            (board, title, target["refId"]): target["expr"]
            for title, panel in self.panels[board].items()
            for target in panel["targets"]
        }

    def answers(self, board: str, chosen: Mapping[str, str] = ALL) -> dict[tuple[str, str], Rows]:
        """By panel and target."""
        found = {key: ask(self.prometheus, expr, self.now, chosen) for key, expr in self.expressions(board).items()}
        return {key[1:]: rows for key, rows in found.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A node, a reconciler that writes nothing, and a Prometheus with the rules, all with windows of seconds."""
    require("prometheus")
    path = tmp_path_factory.mktemp("grafana")
    (path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO), encoding="utf-8")
    config = path / "config.yaml"
    config.write_text(
        f"attribution: {{interval: 1s}}\ndiagnosis: {{interval: 1s, hold: 1s, window: {WINDOW_S}s, coverage_min: 0.5}}\n"
        f"policy: {{candidate_after: {IDLE_FOR_S}s, underused_after: {2 * IDLE_FOR_S}s, startup_grace: 1s}}\n"
        f"alerts: {{interval: 1s, owners_interval: 1s, idle_for: {IDLE_FOR_S}s, idle_short: 3s, wait: 1s, keep: 1s}}\n",
        encoding="utf-8",
    )
    build = [sys.executable, "-m", "tools.dashboard", f"--config.file={config}"]
    subprocess.run([*build, f"--output={path}"], cwd=ROOT, check=True)
    build = [sys.executable, "-m", "tools.rules", f"--config.file={config}"]
    subprocess.run([*build, f"--output={path / 'rules'}"], cwd=ROOT, check=True)
    panels = {}
    for name in BUILT:
        dashboard: dict[str, Any] = json.loads((path / f"gpu-{name}.json").read_text("utf-8"))
        panels[name] = {panel["title"]: panel for panel in dashboard["panels"] if panel["type"] != "row"}
    with Processes(path) as processes:
        exporter, url = processes.start_exporter(
            f"--config.file={config}",
            f"--devices.scenario={path / 'scenario.yaml'}",
            "--no-attribution.kubelet",
            "--no-attribution.slurm",
        )
        address = f"127.0.0.1:{free_port()}"
        flags = ("--interval=2s", "--no-kubernetes", "--no-slurm", f"--web.listen-address={address}")
        processes.start([*GPU_EXPORTER, "reconcile", f"--source.exporter={url}", f"--config.file={config}", *flags])
        place = {"node": "gpu-node-1", "instance": "gpu-node-1"}
        jobs = {"gpu-exporter": (url.removeprefix("http://"), place), "gpu-exporter-reconciler": (address, {})}
        prometheus = Prometheus(
            processes,
            path / "prometheus",
            {},
            scrape_configs=[
                {"job_name": job, "honor_labels": True, "static_configs": [{"targets": [target], "labels": labels}]}
                for job, (target, labels) in jobs.items()
            ],
            rules=sorted((path / "rules").glob("*.yaml")),
        )

        def is_settled(at: float) -> bool:
            """Whether the lost GPU is reported, the idle GPUs have been idle long enough, and the states have a full window."""
            lost = prometheus.query("gpu_up == 0", at)
            idle = prometheus.query('allocation:gpu_share:part{part="idle_long"}', at)
            known = prometheus.query('gpu_allocation_state{state!="unknown"} and on (uuid) gpu_up == 1', at)
            seen = prometheus.query(f"time() - gpu_allocation_start_timestamp_seconds > {WINDOW_S + 3}", at)
            covered = prometheus.query("allocation:gpu_coverage:ratio30m >= 0.9", at)
            scraped = prometheus.query(f"count_over_time(namespace:gpu_gpus:sum[1m]) >= {SCRAPES}", at)
            marks = prometheus.query('gpu_reconciler_allocation_stage{stage="underused"}', at)
            new = prometheus.query("gpu_tenant_held_gpu_seconds_total == 0", at)  # for the first minute of a tenant
            counts = (len(lost), len(idle), len(known), len(seen), len(marks), len(new))
            return counts == (1, 2, 5, 7, 2, 0) and len(covered) >= 5 and bool(scraped)

        def settled() -> float | None:
            """The moment of all queries, at which the node had been in its state for some evaluations of the rules."""
            at = prometheus.complete_until()
            return at if at is not None and is_settled(at) and is_settled(at - 3.0) else None

        now = wait_for(settled, "the node to be in the state of the scenario", each_s=0.25)
        yield Site(prometheus, exporter, panels, now)


VISION = {"$namespace": "vision", "$pod": "train-0", "$jobid": ""}
JOB = {"$namespace": "", "$pod": "", "$jobid": "48113"}


@pytest.mark.parametrize("board", BUILT)
def test_every_expression_has_data_or_a_reason_for_having_none(site: Site, board: str) -> None:
    chosen = VISION if board == "holder" else ALL
    empty = {key for key, rows in site.answers(board, chosen).items() if not rows}
    assert empty == {key[1:] for key in EMPTY if key[0] == board}


def test_the_fleet_dashboard_adds_up_to_the_truth(site: Site) -> None:
    answers = site.answers("fleet")
    shown = {title: one(answers[title, "A"]) for title in FLEET}
    assert shown == pytest.approx(FLEET)
    parts = [one(answers["GPUs over time", ref]) for ref in "ABCDEFGH"]
    assert sum(parts) == pytest.approx(7.0)
    assert parts == pytest.approx([shown[title] for title in FLEET if title != "Held"])
    title = "Holders, longest idle first"
    since = {(row.get("pod", ""), row.get("job_id", "")): row for row, _ in answers[title, "since"]}
    idle = {(row.get("pod", ""), row.get("job_id", "")): value for row, value in answers[title, "for"]}
    gpus = {(row.get("pod", ""), row.get("job_id", "")): value for row, value in answers[title, "gpus"]}
    many = {(row.get("pod", ""), row.get("job_id", "")): value for row, value in answers[title, "idle"]}
    names = {("train-0", ""), ("ranker-7", ""), ("embedder-1", ""), ("", "48113"), ("", "48090")}
    assert since.keys() == idle.keys() == gpus.keys() == many.keys() == names, "whose use is unknown is not idle"
    assert {key for key, value in idle.items() if value > IDLE_FOR_S} == {("embedder-1", ""), ("", "48113")}
    assert since["", "48113"]["stage"] == since["embedder-1", ""]["stage"] == "underused"
    assert (since["", "48113"]["user"], since["", "48113"]["account"]) == ("mira", "phys")
    assert "stage" not in since["train-0", ""]
    assert [since[key]["state"] for key in (("train-0", ""), ("", "48113"))] == ["healthy", "held_idle"]
    assert (gpus["embedder-1", ""], many["embedder-1", ""], many["train-0", ""]) == (pytest.approx(2 / 7), 1.0, 0.0)
    check_hours(answers)


def test_every_panel_is_cheap_for_a_day_of_two_thousand_gpus(tmp_path: Path) -> None:
    require("promtool")
    costs = list(measure(tmp_path, nodes=250, hours=24))
    by_panel = {(cost.board, cost.title): cost for cost in costs}
    assert len(costs) > 70 and by_panel["fleet", "GPUs over time"].samples > 2_000_000
    assert by_panel["holder", "Slowed down"].samples > 10_000, "the day of one whole node is there"
    # The samples are the cost, which no other load changes. The time only shows a query that does not end: it was 2 s at
    # most, on two cores that also ran other tests.
    dear = [cost for cost in costs if cost.samples > 50_000_000 or cost.seconds > 20.0]
    assert not dear
    # A table has a few hundred rows and one query per column. A reader cannot tell more than a hundred curves apart.
    assert {cost.title: cost.series for cost in costs if cost.series > 100} == {
        "Holders, longest idle first": 400,
        "GPU-hours by namespace, account and user": 600,
        "Nodes": 1005,
    }


def check_hours(answers: dict[tuple[str, str], Rows]) -> None:
    """Hours of the last seconds: idle holders, working holders, and unknown holders."""
    title = "GPU-hours by namespace, account and user"

    def by(ref: str) -> dict[str, float]:
        return {
            row.get("namespace", row.get("account", row.get("user", ""))): value * 3600
            for row, value in answers[title, ref]
        }

    held, idle, unknown, share = by("held"), by("idle"), by("unknown"), by("share")
    assert held.keys() == {"vision", "ml", "serving", "phys", "bio", "jonas"} == idle.keys() == unknown.keys()
    # On a busy machine a poll more or less of some fifteen belongs to these seconds.
    assert held["vision"] == pytest.approx(held["jonas"], rel=0.2) == pytest.approx(held["serving"] * 7 / 5, rel=0.2)
    assert idle["vision"] == idle["jonas"] == 0.0
    assert idle["phys"] == pytest.approx(held["phys"], rel=0.3)
    assert unknown["ml"] == pytest.approx(held["ml"])
    assert "ml" not in share and share["phys"] / 3600 == pytest.approx(1.0)
    assert share["serving"] / 3600 == pytest.approx(2 / 5, abs=0.05)
    bars = {
        row.get("namespace", "") + row.get("account", ""): value * 3600
        for row, value in answers["Idle GPU-hours by namespace or account", "A"]
    }
    assert bars == pytest.approx({key if key != "jonas" else "": value for key, value in idle.items()})
    assert one(answers["Idle GPU-hours", "A"]) * 3600 == pytest.approx(sum(idle.values()))


def test_a_namespace_filters_holders_and_keeps_gpus_without_a_holder(site: Site) -> None:
    answers = site.answers("fleet", {"$namespace": "serving|absent"})
    shown = {title: one(answers[title, "A"]) for title in FLEET}
    held = {"Held": 5 / 7, "Used": 3 / 7, f"Idle {IDLE_FOR_S}s or more": 2 / 7, "Use unknown": 0.0}
    assert shown == pytest.approx(FLEET | held)


@pytest.mark.parametrize(
    ("chosen", "idle", "state", "activity"), [(VISION, 0, "healthy", 0.64), (JOB, IDLE_FOR_S, "held_idle", 0.0)]
)
def test_the_holder_dashboard_shows_only_the_holders_gpu(
    site: Site, chosen: Mapping[str, str], idle: float, state: str, activity: float
) -> None:
    answers = site.answers("holder", chosen)
    names = [{"namespace": "vision", "pod": "train-0"}, {"job_id": "48113"}]
    shown = [labels for target in "AB" for labels, _ in answers["Its report", target]]
    assert shown == [names[0 if chosen == VISION else 1]]
    assert one(answers["GPUs", "A"]) == 1.0
    ((_, run),) = answers["Idle for", "A"]
    assert run == 0 if idle == 0 else run > idle
    ((labels, _),) = answers["Its GPUs", "since"]
    assert (labels["state"], labels["name"]) == (state, "NVIDIA H100 80GB HBM3")
    assert [value for _, value in answers["State", "A"]] == [STATE_NUMBERS[state]]
    assert [value for _, value in answers["Activity", "A"]] == pytest.approx([activity])
    assert [value for _, value in answers["Marks", "A"]] == ([2.0] if idle else [])


def test_the_dashboard_of_a_missing_holder_does_not_show_all_holders(site: Site) -> None:
    nobody = {"$namespace": "", "$pod": "", "$jobid": ""}
    rows = {key for key, found in site.answers("holder", nobody).items() if found}
    assert rows == set()


def test_the_dashboard_shows_the_activity_of_each_mig_instance(site: Site) -> None:
    ranker = {"$namespace": "serving", "$pod": "ranker-7", "$jobid": ""}
    answers = site.answers("holder", ranker)
    assert one(answers["GPUs", "A"]) == pytest.approx(3 / 7)
    assert [value for _, value in answers["Activity", "A"]] == [], "what the whole board does is not its own"
    ((labels, activity),) = answers["Activity", "B"]
    assert (labels["mig"], activity > 0.5) == ("1/0", True)


def test_the_node_dashboard_shows_nodes_and_their_gpus(site: Site) -> None:
    answers = site.answers("node")
    assert [one(answers[title, "A"]) for title in ("GPUs that answer", "Lost")] == [6.0, 1.0]
    assert one(answers["Held", "A"]) == pytest.approx(FLEET["Held"])
    nodes = {name: value for name in ("gpus", "answer", "held") for _, value in answers["Nodes", name]}
    assert nodes == pytest.approx({"gpus": 7.0, "answer": 6.0, "held": FLEET["Held"]})
    buckets = {row["le"]: value for row, value in answers["All GPUs by utilization", "A"]}
    assert buckets["1"] >= buckets["0.9"] >= buckets["0.75"] == buckets["0"] >= 2  # two GPUs are at 0.8
    holders = {(row["gpu"], row.get("mig", ""), row["holder"]) for row, _ in answers["Holders", "A"]}
    assert ("3", "2/0", "serving/embedder-1") in holders and ("1", "", "job 48113") in holders and len(holders) == 7
    instances = {row["mig"]: row for row, _ in answers["MIG instances", "info"]}
    assert [instances[mig].get("holder") for mig in ("1/0", "2/0", "3/0")] == [
        "serving/ranker-7",
        "serving/embedder-1",
        None,
    ]
    free = {row["mig"]: value for row, value in answers["MIG instances", "free"]}
    assert free == pytest.approx(dict.fromkeys(("1/0", "2/0", "3/0"), 2 / 7))
    health = {row["gpu"]: value for row, value in answers["Health", "up"]}
    assert health == {str(gpu): float(gpu != 5) for gpu in range(7)}


def test_the_operations_dashboard_shows_exporters_and_reconciler(site: Site) -> None:
    answers = site.answers("operations")
    numbers = {"Exporters": 1.0, "Silent": 0.0, "Driver down": 0.0, "Sources down": 0.0}
    assert {title: one(answers[title, "A"]) for title in numbers} == numbers
    assert {row["stage"]: value for row, value in answers["Decisions", "A"]} == {"underused": 2.0}
    assert {row["reason"]: value for row, value in answers["Frozen", "A"]}["source"] == 0.0
    ((_, age),), ((_, coverage),) = answers["Age of the last sample", "A"], answers["Coverage", "A"]
    assert -1 < age < 5 and 5 / 7 - 0.1 < coverage < 6 / 7 + 0.1


def test_every_rule_succeeds_and_an_ended_exporter_leaves_no_zero(site: Site) -> None:
    """Runs last: its GPUs have no data, which makes no GPU idle or free."""
    rules = json.loads(fetch(f"{site.prometheus.url}/api/v1/rules") or "")["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
    site.exporter.stop()
    gone = "count(namespace:gpu_gpus:sum{part!='no_data'}) or absent(namespace:gpu_gpus:sum{part!='no_data'}) - 1"

    def is_gone() -> float | None:
        at = site.prometheus.complete_until()
        return at if at is not None and site.prometheus.query(gone, at) == [({}, 0.0)] else None

    after = site._replace(now=wait_for(is_gone, "the recordings to see that it is gone", each_s=0.2))
    answers = after.answers("fleet")
    shown = {title: one(answers[title, "A"]) for title in FLEET}
    assert shown == dict.fromkeys(FLEET, 0.0) | {"No data": 7.0}
    assert after.answers("node")["GPUs that answer", "A"] == []
    assert one(after.answers("operations")["Silent", "A"]) == 1.0


def test_smaller_would_do_lists_holders_with_low_load_and_little_memory(tmp_path: Path) -> None:
    """Three days with a sample every half hour. One of five holders fulfils every condition."""
    require("promtool")
    series = []
    for number, (hours, mean, peak, share) in enumerate(
        ((72, 0.1, 5e9, 1), (72, 0.5, 5e9, 1), (72, 0.1, 50e9, 1), (20, 0.1, 5e9, 1), (72, 0.1, 5e9, 1 / 7))
    ):
        place = f'node="n1", uuid="GPU-{number}", scheduler="slurm", job_id="{number}"'
        for recording, value in (
            ("allocation:gpu_observed_seconds:increase30m", 1800),
            ("allocation:gpu_busy_seconds:increase30m", 1800 * mean),
            ("allocation:gpu_memory_used_bytes:max30m", peak),
            ("allocation:gpu_share:ratio", share),
            ("allocation:owner:info", 1),
        ):
            series.append({"series": f"{recording}{{{place}}}", "values": f"{value}x{2 * hours - 1}"})
        series.append(
            {"series": f'unit:gpu_model:info{{node="n1", uuid="GPU-{number}", name="H100"}}', "values": "1x150"}
        )
    labels = '{scheduler="slurm", job_id="0"'
    wanted = {"hours": 72, "mean": 0.1, "peak": 5e9}
    asked = Fleet(Settings()).smaller()
    cases = [
        {
            "expr": f"round({ask_all(asked[name])}, 0.001)",
            "eval_time": "71h30m",
            "exp_samples": [{"labels": labels + "}", "value": value}],
        }
        for name, value in wanted.items()
    ]
    model = {"labels": labels + ', name="H100"}', "value": 1}
    cases.append({"expr": ask_all(asked["model"]), "eval_time": "71h30m", "exp_samples": [model]})
    test = {"tests": [{"interval": "30m", "input_series": series, "promql_expr_test": cases}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ask_all(expression: str) -> str:
    """Query over three days with every variable of the dashboard at All."""
    return expression.replace("$__range", "72h").replace("$cluster", ".*").replace("$namespace", ".*")


DRIVERS = {  # node: gpu_driver_up, gpu_devices_expected, GPUs by another kernel driver
    "works": (1, 8, None),
    "down": (0, 8, None),
    "not-loaded": (0, 0, "none"),
    "given-away": (0, 0, "vfio-pci"),
    "cpu-only": (0, 0, None),
}


@pytest.mark.parametrize(
    ("nodes", "down"),
    [("down", 1), ("not-loaded", 1), ("cpu-only", 0), ("given-away", 0), ("works", 0), (".*", 2)],
)
def test_a_driver_is_down_only_if_its_node_expects_a_gpu(tmp_path: Path, nodes: str, down: int) -> None:
    require("promtool")
    series = []
    for node, (up, expected, driver) in DRIVERS.items():
        place = f'node="{node}", instance="{node}"'
        series.append({"series": f"gpu_driver_up{{{place}}}", "values": str(up)})
        series.append({"series": f"gpu_devices_expected{{{place}}}", "values": str(expected)})
        if driver is not None:
            series.append({"series": f'gpu_devices_unmanaged{{{place}, driver="{driver}"}}', "values": "8"})
    expression = Operations(Settings()).driver_down().replace("$node", nodes)
    expression = expression.replace("$job", ".*").replace("$cluster", ".*")
    case = {"expr": expression, "eval_time": "0s", "exp_samples": [{"labels": "{}", "value": down}]}
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_holder_with_an_unknown_gpu_is_not_idle_and_clusters_are_not_mixed(tmp_path: Path) -> None:
    require("promtool")
    series = []
    for cluster, known in (("a", 2), ("b", 1)):  # both clusters use the same names
        for gpu in range(2):
            key = f'cluster="{cluster}", node="n", uuid="GPU-{gpu}", scheduler="slurm", job_id="7"'
            raw = f'job="gpu-exporter", instance="n", gpu="{gpu}", {key}'
            values = {
                f"allocation:gpu_share:ratio{{{key}}}": 1,
                f"allocation:gpu_start_timestamp_seconds:max{{{key}}}": 1,
                f"gpu_allocation_share_ratio{{{raw}}}": 1,
                f'gpu_temperature_celsius{{job="gpu-exporter", cluster="{cluster}", node="n", gpu="{gpu}"}}': 40
                + 50 * known,
            }
            if gpu < known:
                values[f"allocation:gpu_idle_run_seconds:known{{{key}}}"] = 9000 + gpu
                values[f"gpu_allocation_idle_run_seconds{{{raw}}}"] = 9000 + gpu
            series += [{"series": name, "values": str(value)} for name, value in values.items()]
        owner = f'allocation:owner:info{{cluster="{cluster}", scheduler="slurm", job_id="7", user="u"}}'
        success = f'gpu_reconciler_last_success_timestamp_seconds{{cluster="{cluster}"}}'
        series += [{"series": owner, "values": "1"}, {"series": success, "values": "0" if known == 1 else "-100"}]
    chosen = {"$cluster": ".*", "$namespace": "", "$pod": "", "$jobid": "7"}

    def case(expression: str, *samples: tuple[str, float], **more: str) -> dict[str, Any]:
        filled = {**VARIABLES, **chosen, **{f"${name}": value for name, value in more.items()}}
        for name in sorted(filled, key=len, reverse=True):
            expression = expression.replace(name, filled[name])
        wanted = [{"labels": labels, "value": value} for labels, value in samples]
        return {"expr": expression, "eval_time": "0s", "exp_samples": wanted}

    heat = Node().gauge("gpu_temperature_celsius")
    cases = [
        case(
            Fleet(Settings()).holders()["for"], ('{cluster="a", scheduler="slurm", job_id="7"}', 9000), namespace=".*"
        ),
        case(Holder(Settings()).idle_for(), ("{}", 9000), cluster="a"),
        case(Holder(Settings()).idle_for(), cluster="b"),
        case(
            heat,
            *(
                (f'{{cluster="{cluster}", node="n", gpu="{gpu}"}}', value)
                for cluster, value in (("a", 140), ("b", 90))
                for gpu in (0, 1)
            ),
        ),
        case(Operations(Settings()).last_success(), ("{}", 100)),
    ]
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": cases}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
