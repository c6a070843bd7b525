"""Scenario files: valid files are read, invalid files are refused with the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.testbed.nvml.scenarios import GENERATIONS, PATHS

import gpu_exporter
from gpu_exporter.agent.devices.products import PRODUCTS
from gpu_exporter.agent.devices.scenario import ScenarioError, load_scenario, parse_scenario

DEMO = Path(gpu_exporter.__file__).parent / "cli" / "demo.yaml"


def test_the_demo_scenario_has_all_its_promised_cases() -> None:
    scenario = load_scenario(DEMO)
    assert len(scenario.gpus) == 11
    assert any(gpu.mig for gpu in scenario.gpus)
    assert any("hw_thermal" in gpu.throttle for gpu in scenario.gpus)
    assert any(holder.processes == 0 for holder in scenario.holders)
    held = {holder.gpu for holder in scenario.holders}
    assert held < {gpu.index for gpu in scenario.gpus}


def schema() -> Draft202012Validator:
    return Draft202012Validator(
        json.loads((DEMO.parents[1] / "agent" / "devices" / "scenario.schema.json").read_text("utf-8"))
    )


@pytest.mark.parametrize("name", PATHS)
def test_the_published_schema_accepts_every_scenario_of_the_tests(name: str) -> None:
    schema().validate(yaml.safe_load(PATHS[name].read_text("utf-8")))


def test_every_product_has_a_scenario() -> None:
    assert {gpu["model"] for gpu in GENERATIONS.values()} == set(PRODUCTS)


def test_the_published_schema_accepts_the_demo_and_every_kind_of_load() -> None:
    schema().validate(yaml.safe_load(DEMO.read_text("utf-8")))
    kinds = (
        {"kind": "constant", "value": 0.5},
        {"kind": "square", "period": 10},
        {"kind": "ramp", "from": 0, "to": 1, "duration": 60},
        {"kind": "curve", "points": [[0, 0], [5, 1]]},
    )
    for load in kinds:
        data = {"gpus": [{"model": "A100", "load": load, "faults": [{"at": 1, "call": "*", "hang_ms": 5}]}]}
        schema().validate(data)
        parse_scenario(data)
    products = schema().schema["$defs"]["gpu"]["properties"]["model"]["enum"]
    assert products == list(PRODUCTS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "scenario: expected a mapping, not list"),
        ({"gpus": [{"model": "H100", "lod": {}}]}, "gpus[0].lod: unknown key, did you mean load?"),
        ({"gpus": [{"modl": "H100"}]}, "gpus[0]: model is missing; is 'modl' meant for it?"),
        (
            {"gpus": [{"model": "H999"}]},
            "gpus[0].model: 'H999' is not one of T4, V100, A100, A30, H100, H200, B200, GH200, GB200, B300, GB300",
        ),
        (
            {"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 1.5}}]},
            "gpus[0].load.value: 1.5 is not between 0 and 1",
        ),
        (
            {"gpus": [{"model": "H100", "load": {"kind": "square", "period": 0}}]},
            "gpus[0].load.period: must be above 0",
        ),
        (
            {"gpus": [{"model": "H100", "load": {"kind": "curve", "points": [[5, 0], [1, 0]]}}]},
            "gpus[0].load.points[1]: time goes backwards",
        ),
        ({"gpus": [{"model": "H100", "load": {"kind": "constant"}}]}, "gpus[0].load: value is missing"),
        ({"gpus": [{"model": "H100", "load": {"value": 1}}]}, "gpus[0].load: kind is missing"),
        ({"gpus": [{"model": "H100", "load": {"kind": None}}]}, "gpus[0].load.kind: expected a string, not None"),
        (
            {"gpus": [{"model": "H100", "faults": [{"at": 1, "call": "x"}]}]},
            "gpus[0].faults[0]: exactly one of error and hang_ms is required",
        ),
        (
            {"gpus": [], "holders": [{"gpu": 0, "kind": "pod", "name": "a/b/c"}]},
            "holders[0].gpu: no GPU 0: the scenario has 0 GPUs, numbered from 0",
        ),
        (
            {"gpus": [{"model": "H100"}], "holders": [{"gpu": 0, "kind": "pod", "name": "trainer"}]},
            "holders[0].name: expected namespace/pod/container, not 'trainer'",
        ),
    ],
)
def test_an_invalid_scenario_is_refused_with_the_place(data: object, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        parse_scenario(data)
    assert str(error.value) == message
    if "time goes backwards" not in message and "GPUs" not in message and "namespace" not in message:
        assert not schema().is_valid(data)  # the schema rejects all that a schema can express


def test_the_error_of_a_scenario_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("gpus: 3\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"bad\.yaml: scenario\.gpus: expected a list, not int"):
        load_scenario(path)
