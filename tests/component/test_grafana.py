"""The dashboard's queries against a real Prometheus that scrapes a simulated node of which the truth is known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana.queries import Queries

from gpu_exporter.defaults import Settings
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.servers import Prometheus, require

ROOT = Path(__file__).resolve().parents[2]
IDLE_FOR_S, WINDOW_S = 6, 5
SCRAPES = 12  # one a second
VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "15s",
    "$node": ".*",
    "$namespace": ".*",
}
# Seven GPUs: busy pod, idle job, pod whose GPU tells no utilization, MIG (busy pod, idle pod, free), free, job whose GPU
# gets lost, busy job.
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
STATS = {
    "GPUs in all": 7.0,
    "Held": 5 + 3 / 7 + 2 / 7,
    "Held and used": 2 + 3 / 7,
    f"Idle under {IDLE_FOR_S}s": 0.0,
    f"Idle for {IDLE_FOR_S}s or more": 1 + 2 / 7,
    "Use unknown": 2.0,
    "Free": 1 + 2 / 7,
    "Without data": 1.0,
    "Exporters reporting": 1.0,
    "Exporters silent": 0.0,
    "Driver down": 0.0,
    "Sources of holders down": 0.0,
}
# holder, user, account, GPU, MIG instance: state, used, idle; None is unknown
HOLDERS = {
    ("vision/train-0/main", "", "", "0", ""): ("healthy", True, False),
    ("job 48113", "mira", "phys", "1", ""): ("held_idle", False, True),
    ("ml/mute-0/main", "", "", "2", ""): ("unknown", None, None),
    ("serving/ranker-7/server", "", "", "3", "1/0"): ("healthy", True, False),
    ("serving/embedder-1/server", "", "", "3", "2/0"): ("held_idle", False, True),
    ("job 48200", "lea", "bio", "5", ""): ("unknown", None, None),
    ("job 48090", "jonas", "", "6", ""): ("healthy", True, False),
}

pytestmark = pytest.mark.servers

Rows = list[tuple[dict[str, str], float]]


def ask(prometheus: Prometheus, expression: str, at: float) -> Rows:
    """An instant query with the variables filled in as Grafana would. Fails when the server refuses it, and at NaN."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression.replace("job $1", "").replace("account $1", "").replace("namespace $1", "")
    rows = prometheus.query(expression, at)
    assert all(value == value for _, value in rows), f"NaN in the answer to {expression}"
    return rows


def one(rows: Rows) -> float:
    """The value of an answer that is one number."""
    ((labels, value),) = rows
    assert labels == {}
    return value


def test_every_panel_shows_the_truth(processes: Processes, tmp_path: Path) -> None:
    started = time.monotonic()
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO), encoding="utf-8")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"attribution: {{interval: 1s}}\ndiagnosis: {{interval: 1s, hold: 1s, window: {WINDOW_S}s, coverage_min: 0.5}}\n"
        f"policy: {{candidate_after: {IDLE_FOR_S}s, underused_after: {2 * IDLE_FOR_S}s}}\n",
        encoding="utf-8",
    )
    build = [sys.executable, "-m", "tools.dashboard", f"--config.file={config}"]
    subprocess.run([*build, f"--output={tmp_path}"], cwd=ROOT, check=True)
    dashboard: dict[str, Any] = json.loads((tmp_path / "gpu-allocation.json").read_text("utf-8"))
    panels = {panel["title"]: panel for panel in dashboard["panels"] if panel["type"] != "row"}
    exporter, url = processes.start_exporter(
        f"--config.file={config}",
        f"--devices.scenario={tmp_path / 'scenario.yaml'}",
        "--no-attribution.kubelet",
        "--no-attribution.slurm",
    )
    prometheus = Prometheus(
        processes,
        tmp_path / "prometheus",
        {"gpu-node-1": url.removeprefix("http://")},
        rules=sorted((ROOT / "alerts" / "rules").glob("*.yaml")),
    )

    def is_settled() -> bool:
        """The lost GPU is seen to be lost, the idle ones are idle for long enough, and the states have a whole window."""
        lost = prometheus.query("gpu_up == 0")
        idle = prometheus.query(f"gpu_allocation_idle_run_seconds > {IDLE_FOR_S} and on (uuid) gpu_up == 1")
        known = prometheus.query('gpu_allocation_state{state!="unknown"} and on (uuid) gpu_up == 1')
        seen = prometheus.query(f"time() - gpu_allocation_start_timestamp_seconds > {WINDOW_S + 3}")
        scraped = prometheus.query(f"count_over_time(gpu_up[1m]) >= {SCRAPES}")
        return (len(lost), len(idle), len(known), len(seen), len(scraped)) == (1, 2, 5, 7, 7)

    wait_for(is_settled, "the node to be in the state of the scenario", 30, 0.25)
    # The time of a scrape that is there in full: a later one may be half-way between two of our queries.
    ((_, now),) = prometheus.query("max(timestamp(gpu_up))")
    answers = {
        (title, target["refId"]): ask(prometheus, target["expr"], now)
        for title, panel in panels.items()
        for target in panel["targets"]
    }
    small = {key for key in answers if key[0] == "Smaller would do"}  # nobody here has held a GPU for a day
    assert {key for key, rows in answers.items() if not rows} == small and len(small) == 4
    print(f"{len(answers)} queries answered after {time.monotonic() - started:.1f} s")

    stats = {title: one(answers[title, "A"]) for title, panel in panels.items() if panel["type"] == "stat"}
    assert stats == pytest.approx(STATS)
    used, idle_short, idle_long, unknown, held, total = (one(answers["Held and used GPUs", ref]) for ref in "ABCDEF")
    assert used + idle_short + idle_long + unknown == pytest.approx(held)
    assert (idle_short, held, total) == (0.0, pytest.approx(STATS["Held"]), 7.0)
    check_holders(answers, now)
    check_hours(answers)

    ((_, power),) = answers["Power by node", "A"]
    assert 7 * 70 < power < 7 * 700
    ((labels, busy),) = answers["Utilization by node", "A"]
    assert labels == {"node": "gpu-node-1"}
    assert 2 * 0.8 / 5 - 0.02 < busy < 2 * 0.8 / 4 + 0.02  # of 4 that are known, and of one that was until it got lost
    (instances,) = answers["Utilization by node", "B"]
    assert instances == ({"node": "gpu-node-1"}, pytest.approx(0.8 / 3, abs=0.05))
    ((_, age),), ((_, coverage),) = answers["Age of the last sample", "A"], answers["Coverage", "A"]
    assert -1 < age < 5 and 5 / 7 - 0.1 < coverage < 6 / 7 + 0.1
    check_one_namespace(prometheus, panels, now)
    rules = json.loads(fetch(f"{prometheus.url}/api/v1/rules") or "")["data"]["groups"]
    assert {group["name"] for group in rules} > {"gpu-exporter.seam", "gpu-exporter.owners", "gpu-exporter.fleet"}
    assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}  # the seam's minute
    exporter.stop()
    check_silence(prometheus, panels)


def check_holders(answers: dict[tuple[str, str], Rows], now: float) -> None:
    """The table, row by row, joined as Grafana's `merge` does it: by the labels that all three answers have."""
    title = "Holders, longest idle first"
    shared = ("node", "gpu", "uuid", "mig", "mig_uuid", "scheduler", "namespace", "pod", "container", "job_id")

    def by_key(ref: str) -> dict[tuple[str, ...], float]:
        return {tuple(labels.get(name, "") for name in shared): value for labels, value in answers[title, ref]}

    utilization, idle = by_key("utilization"), by_key("idle")
    rows = {}
    for labels, since in answers[title, "holders"]:
        key = tuple(labels.get(name, "") for name in shared)
        who = tuple(labels.get(name, "") for name in ("holder", "user", "account", "gpu", "mig"))
        assert labels["node"] == "gpu-node-1" and labels["name"] == "NVIDIA H100 80GB HBM3"
        assert 0 < now - since / 1000 < 60
        assert idle.get(key, 0) < now - since / 1000 + 1
        if key in utilization:
            assert utilization[key] in (0.0, pytest.approx(0.8, abs=0.02)), who
        used = utilization[key] > 0 if key in utilization else None
        rows[who] = (labels["state"], used, idle[key] > IDLE_FOR_S if key in idle else None)
    assert rows == HOLDERS
    assert len(answers[title, "holders"]) == len(HOLDERS)
    assert set(utilization) == set(idle) and len(idle) == 5
    longest = max(idle, key=lambda key: idle[key])
    assert longest[-1] == "48113" or longest[-3] == "embedder-1"


def check_hours(answers: dict[tuple[str, str], Rows]) -> None:
    """Hours of the last seconds: who wasted, who did not, and of whom nothing is known."""
    title = "GPU-hours by namespace or account"
    held, idle, unknown, share = (
        {labels["tenant"]: value * 3600 for labels, value in answers[title, ref]}
        for ref in ("held", "idle", "unknown", "share")
    )
    slurm = {"account phys", "account bio", "Slurm, no account"}
    assert set(held) == {"namespace vision", "namespace ml", "namespace serving"} | slurm
    assert set(unknown) == set(held) and set(idle) == set(share) == set(held) - {"namespace ml"}
    assert idle["namespace vision"] == idle["Slurm, no account"] == 0.0
    assert idle["account phys"] == pytest.approx(held["account phys"], rel=0.3)
    assert idle["namespace serving"] == pytest.approx(held["namespace serving"] * 2 / 5, rel=0.3)
    assert unknown["namespace ml"] == held["namespace ml"] > 5
    assert share["account phys"] / 3600 == pytest.approx(1, abs=0.05)
    assert share["namespace serving"] / 3600 == pytest.approx(2 / 5, abs=0.05)
    wasted = answers["Wasted GPU-hours by namespace or account", "A"]
    assert {labels["tenant"]: value * 3600 for labels, value in wasted} == idle
    assert wasted == sorted(wasted, key=lambda row: -row[1])


def check_one_namespace(prometheus: Prometheus, panels: dict[str, Any], now: float) -> None:
    """One namespace chosen: the holders of others disappear, the totals of the node stay."""
    for title, expected in (("Held", 5 / 7), ("Held and used", 3 / 7), ("Use unknown", 0.0), ("GPUs in all", 7)):
        (target,) = panels[title]["targets"]
        expression = target["expr"].replace("$namespace", "serving|nobody")
        assert one(ask(prometheus, expression, now)) == pytest.approx(expected), title


def check_silence(prometheus: Prometheus, panels: dict[str, Any]) -> None:
    """The exporter has ended: its GPUs are without data, and nothing is 0, idle or free because of that."""
    wait_for(lambda: not prometheus.query("gpu_up"), "Prometheus to see that the exporter is gone", each_s=0.1)
    now = time.time()
    answers = {
        title: ask(prometheus, panel["targets"][0]["expr"], now)
        for title, panel in panels.items()
        if panel["type"] == "stat"
    }
    known = {"GPUs in all": 7.0, "Without data": 7.0, "Exporters silent": 1.0}
    assert {title: one(rows) for title, rows in answers.items() if rows} == known


def test_smaller_would_do_for_who_did_little_with_little_memory(tmp_path: Path) -> None:
    """Half an hour between samples; three days. Of five holders one is all of it."""
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
    labels = '{scheduler="slurm", job_id="0", holder="job 0"'
    wanted = {"hours": 72, "mean": 0.1, "peak": 5e9}
    asked = Queries(Settings()).oversized
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
    """With every variable of the dashboard at All, over three days."""
    return expression.replace("$__range", "72h").replace("$node", ".*").replace("$namespace", ".*")


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
def test_a_driver_is_down_only_where_a_gpu_is_expected(tmp_path: Path, nodes: str, down: int) -> None:
    require("promtool")
    series = []
    for node, (up, expected, driver) in DRIVERS.items():
        place = f'node="{node}", instance="{node}"'
        series.append({"series": f"gpu_driver_up{{{place}}}", "values": str(up)})
        series.append({"series": f"gpu_devices_expected{{{place}}}", "values": str(expected)})
        if driver is not None:
            series.append({"series": f'gpu_devices_unmanaged{{{place}, driver="{driver}"}}', "values": "8"})
    expression = Queries(Settings()).driver_down.replace("$node", nodes)
    case = {"expr": expression, "eval_time": "0s", "exp_samples": [{"labels": "{}", "value": down}]}
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
