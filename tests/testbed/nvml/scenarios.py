"""The scenarios of tests/scenarios: one for each product and mode; they document the hardware that tests cover.

Each scenario can also be run by hand: gpu-exporter --once --format table --devices.scenario tests/scenarios/h100-mig.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gpu_exporter.agent.devices.scenario import Scenario, parse_scenario

FOLDER = Path(__file__).resolve().parents[2] / "scenarios"


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
GENERATIONS: dict[str, dict[str, Any]] = {name: _read(path)["gpus"][0] for name, path in PATHS.items()}


def build(name: str) -> Scenario:
    """One GPU of that generation, with a holder that uses 12 GiB."""
    return parse_scenario(_read(PATHS[name]))
