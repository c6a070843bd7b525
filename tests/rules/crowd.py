"""Crowds: worlds in which names repeat. Two clusters have nodes, pods and GPUs of the same names, with different values.

Each node also has two targets that disagree. The recordings and the firing alerts of a crowd are in its file in
tests/golden/rules. A rule that confuses two series changes a line there. `make golden` rewrites the files: review the diff.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from tests.rules.crowd_others import (
    both_of_nvidia_smi,
    compatible,
    dcgm,
    instances,
    nvidia_smi,
    pods_of_nvidia_smi,
)
from tests.rules.crowd_ours import MINUTES, dead, elsewhere, kubernetes, ours
from tests.rules.promtool import Case, build, run
from tests.rules.world import World

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "rules"
LOOK = MINUTES  # odd, because a series that feeds itself exists every other minute: the even minutes
SETTINGS = {"low_over": "30m", "pod_labels": "label_project"}
ROW = re.compile(r"\{[^{}]*\} \S+?(?=, \{|$)")


def crowds() -> Iterator[Case]:
    """The cases, with the expected values of the golden files. Without a file, a case expects nothing."""
    for case in bare():
        path = GOLDEN / f"{case.name}.txt"
        text = path.read_text("utf-8") if path.exists() else ""
        yield replace(case, values=list(parse(text, recorded(case))))


def bare() -> Iterator[Case]:
    """The cases without expected values."""
    for name, optional, fill in (
        ("crowd", "", (ours, dead, kubernetes, elsewhere)),
        ("crowd-compat-dcgm", "compat-dcgm", (compatible, elsewhere)),
        ("crowd-source-dcgm", "source-dcgm", (dcgm, instances, kubernetes)),
        ("crowd-source-nvidia-smi", "source-nvidia-smi", (nvidia_smi, pods_of_nvidia_smi, both_of_nvidia_smi)),
    ):
        world = World(MINUTES)
        for each in fill:
            each(world)
        for series, row in world.series.items():
            if (
                "-too" in series
            ):  # topk takes the larger of two different values; between two equal values its choice is random
                world.series[series] = [None if value is None else value / 2 for value in row]
        settings = SETTINGS | ({"source_window": "80m"} if optional == "source-dcgm" else {})
        yield Case(name, world, settings=settings, optional=optional, is_golden=True)


def recorded(case: Case) -> list[str]:
    """The expressions to evaluate: every recording that the case loads, and the firing alerts."""
    with tempfile.TemporaryDirectory() as name:
        files = build(Path(name) / "rules", case.settings, case.optional).iterdir()
        groups = [group for path in files for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return ["ALERTS", *sorted({rule["record"] for group in groups for rule in group["rules"] if "record" in rule})]


def ask(name: str) -> str:
    """The expression without the last digits, because versions of Prometheus differ there."""
    return f"round({name}, 0.000001)"


def parse(text: str, names: list[str]) -> Iterator[tuple[int, str, list[tuple[str, float]]]]:
    """A golden file as checks for promtool: series that it lacks must not exist."""
    rows: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{.*\}) (\S+)$", text, re.M):
        rows.setdefault(name, []).append((labels, float(value)))
    for name in names:
        yield LOOK, ask(name), rows.get(name, [])


def record(case: Case) -> str:
    """promtool's result for every name, in the form of a golden file."""
    asked = [(LOOK, ask(name), [("absent{}", 0.0)]) for name in recorded(case)]
    with tempfile.TemporaryDirectory() as directory:
        rules = build(Path(directory) / "rules", case.settings, case.optional)
        _, said = run([replace(case, values=asked)], Path(directory), rules)
    assert ", err: " not in said, said[:2000]  # a failing rule would leave no recordings
    lines = [
        f"{name}{row.rpartition(' ')[0]} {float(row.rpartition(' ')[2])!r}"
        for name, got in re.findall(r'expr: "round\(([\w:]+), .*\n.*\n\s+got: (.*)', said)
        for row in ROW.findall(got)
    ]
    return "".join(f"{line}\n" for line in sorted(lines))
