"""Every answer of the program to the same inputs, as files: what a change that only moves code must leave as it is.

    python -m tests.bench.answers OUT [HISTORIES]     then `diff -r` with the folder that another checkout wrote

Inputs: the recordings of real GPUs, the demo, and histories of random nodes (by number, so that each run draws the
same). Answers: series in both formats, JSON with states and causes, holders, table, decisions by exporters' evidence,
and the state file, from which half of the histories are restarted.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import gpu_exporter
from gpu_exporter.agent.devices.scenario import load_scenario, parse_scenario
from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import render_json
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.table import render_table
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.cli.run_demo import PERIOD_MAX_S, SAMPLE_PERIOD_S, demo_settings
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.report import decisions_json
from tests.gpu_review import read
from tests.testbed.simulated_node import SimulatedNode

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"
MODELS = ("H100", "H100", "A100", "H200", "B200", "V100", "T4", "GH200")


def write_answers(node: SimulatedNode, folder: Path, name: str) -> None:
    """All forms of one view, and what the reconciler decides by it."""
    view, renderer = node.view(), TextRenderer()
    text = renderer.render(list_series(view))
    (folder / f"{name}.prom").write_text(text)
    (folder / f"{name}.openmetrics").write_text(renderer.render(list_series(view), openmetrics=True))
    (folder / f"{name}.json").write_text(render_json(view))
    (folder / f"{name}.holders").write_text(render_holders(view))
    (folder / f"{name}.table").write_text(render_table(view))
    policy = Settings().policy._replace(candidate_after=300.0, underused_after=600.0)
    seen = ExporterSource([parse_exporter("node")], policy.underused_after, node.clock, lambda _: text).read_evidence()
    (folder / f"{name}.decisions").write_text(decisions_json(decide(seen, policy), seen, {}))


def random_load(draw: random.Random) -> dict[str, object]:
    kind = draw.choice(("constant", "constant", "curve", "square"))
    if kind == "constant":
        return {"kind": kind, "value": draw.choice((0.0, 0.0, 0.3, 0.99, round(draw.random(), 2)))}
    if kind == "square":
        high, low = round(draw.random(), 2), draw.choice((0.0, 0.05))
        return {"kind": kind, "period": draw.choice((20, 120, 600)), "duty": 0.5, "high": high, "low": low}
    times = sorted(draw.sample(range(10, 2400), draw.randint(1, 4)))
    return {"kind": kind, "points": [[0, 0.5], *([at, draw.choice((0.0, 0.6, 1.0))] for at in times)]}


def random_node(draw: random.Random) -> dict[str, object]:
    """One to four GPUs, some with instances and faults, with holders that come, share and leave."""
    gpus: list[dict[str, object]] = []
    holders: list[dict[str, object]] = []
    for number in range(draw.randint(1, 4)):
        gpu: dict[str, object] = {"model": draw.choice(MODELS), "load": random_load(draw)}
        places: list[dict[str, object]] = [{"gpu": number}]
        if gpu["model"] == "H100" and draw.random() < 0.3:
            gpu = {"model": "H100", "mig": [{"profile": "1g.10gb", "load": random_load(draw)} for _ in range(2)]}
            places = [{"gpu": number, "mig": mig} for mig in range(2)]
        if draw.random() < 0.25:
            call = draw.choice(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"))
            fault = {"at": draw.randint(30, 1500), "for": draw.choice((20, 200)), "call": call}
            gpu["faults"] = [{**fault, "error": draw.choice(("NVML_ERROR_UNKNOWN", "NVML_ERROR_GPU_IS_LOST"))}]
        gpus.append(gpu)
        for place in places:
            for turn in range(draw.randint(0, 3)):
                kind, tag = draw.choice(("pod", "job")), f"{number}{place.get('mig', '')}{turn}"
                begin = draw.choice((0, 0, draw.randint(1, 1800)))
                holder = {**place, "kind": kind, "name": f"ml/w{tag}/main" if kind == "pod" else f"90{tag}"}
                holder |= {"from": begin, "processes": draw.randint(0, 3), "user": draw.choice(("ada", "bob"))}
                holders.append(holder | ({"to": begin + draw.randint(60, 1800)} if draw.random() < 0.5 else {}))
    return {"gpus": gpus, "holders": holders}


def play_history(number: int, folder: Path) -> None:
    draw = random.Random(number)
    scenario = parse_scenario(random_node(draw))
    settings = Settings()
    settings = settings._replace(sampling=settings.sampling._replace(interval=5.0))
    path = folder / f"{number}.state"
    path.mkdir()
    node = SimulatedNode(
        scenario, settings, StateFile(path, 60.0, "boot"), sample_period_s=1.0, driver_period_max_s=10.0
    )
    node.state.restore()
    node.run(draw.choice((600, 1200)))
    node.state.write_state()
    if draw.random() < 0.5:
        write_answers(node, folder, f"{number}.before")
        node.restart(draw.choice((10.0, 120.0)), StateFile(path, 60.0, "boot"))
    node.run(draw.choice((600, 1500)))
    node.state.write_state()
    write_answers(node, folder, str(number))


def play_recording(path: Path, folder: Path) -> None:
    """Every snapshot of the exporter's sampler on a recording."""
    snapshots = read(path, ManualClock())
    (folder / f"{path.stem}.snapshots").write_text("\n".join(map(repr, snapshots)))


def main(arguments: list[str]) -> int:
    folder, histories = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 300
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(RECORDINGS.glob("*.rec.gz")):
        play_recording(path, folder)
    demo = Path(gpu_exporter.__file__).parent.rglob("demo.yaml")
    node = SimulatedNode(load_scenario(next(demo)), demo_settings(), None, SAMPLE_PERIOD_S, PERIOD_MAX_S)
    for look in range(1, 4):
        node.run(1200)
        write_answers(node, folder, f"demo{look}")
    for number in range(histories):
        play_history(number, folder)
    print(json.dumps({"files": len(list(folder.iterdir())), "histories": histories}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
