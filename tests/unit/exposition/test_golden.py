"""Outputs for users, byte for byte: the demo's node after thirty minutes, in every form, and its budgets."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.limits import advise
from tests.testbed.servers import require
from tests.testbed.simulated_node import SimulatedNode

import gpu_exporter
from gpu_exporter.agent.devices.scenario import Scenario, load_scenario, parse_scenario
from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import list_rows, render_json
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.publisher import no_history
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.table import render_table
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.cli.run_demo import PERIOD_MAX_S, SAMPLE_PERIOD_S, demo_settings
from gpu_exporter.common.model.meanings import STATES
from gpu_exporter.common.model.rows import join_rows
from gpu_exporter.common.model.views import View

ROOT = Path(__file__).resolve().parents[3]
DEMO = Path(gpu_exporter.__file__).parent / "cli" / "demo.yaml"


def play(scenario: Scenario, seconds: int) -> SimulatedNode:
    """The demo's node after some time."""
    node = SimulatedNode(scenario, demo_settings(), None, SAMPLE_PERIOD_S, PERIOD_MAX_S)
    node.run(seconds)
    return node


@pytest.fixture(scope="module")
def node() -> SimulatedNode:
    return play(load_scenario(DEMO), 1800)


@pytest.fixture(scope="module")
def view(node: SimulatedNode) -> View:
    return node.view()


def test_prometheus_text_is_unchanged(view: View, golden: Callable[[str, str], None]) -> None:
    golden("demo.prom", TextRenderer().render(list_series(view)))


def test_openmetrics_has_another_name_of_each_counter_and_is_otherwise_the_same(view: View) -> None:
    text = TextRenderer().render(list_series(view))
    counters = re.findall(r"^# TYPE (\w+)_total counter$", text, re.M)
    expected = re.sub(rf"^(# (?:HELP|TYPE) (?:{'|'.join(counters)}))_total ", r"\1 ", text, flags=re.M)
    assert TextRenderer().render(list_series(view), openmetrics=True) == f"{expected}# EOF\n"
    assert len(counters) > 20


def test_json_is_unchanged(view: View, golden: Callable[[str, str], None]) -> None:
    golden("demo.json", render_json(view) + "\n")


def test_holders_are_unchanged(view: View, golden: Callable[[str, str], None]) -> None:
    golden("demo.holders", render_holders(view))


def test_table_is_unchanged(view: View, golden: Callable[[str, str], None]) -> None:
    golden("demo.table", render_table(view))


def test_page_is_unchanged(node: SimulatedNode, golden: Callable[[str, str], None]) -> None:
    golden("demo.html", render_page(node.view(), node.state.history))


def test_both_text_formats_parse_to_the_same_samples(view: View) -> None:
    def samples(families) -> dict:
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}

    renderer = TextRenderer()
    text = samples(parse_text(renderer.render(list_series(view))))
    assert text == samples(parse_openmetrics(renderer.render(list_series(view), openmetrics=True)))
    assert len(text) > 300


def test_promtool_reports_no_problem_in_the_metrics(view: View) -> None:
    require("promtool")
    body = TextRenderer().render(list_series(view))
    done = subprocess.run(["promtool", "check", "metrics"], input=body, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_series_stay_within_their_budget(view: View) -> None:
    """At most 64 per GPU, 24 per MIG instance, 24 per allocation and 6 for the numbers of its causes. Each witness that was ever active adds one. A report of
    a training (training.files) adds 13 to its allocation.
    """
    count: dict[str, int] = {}
    for series in list_series(view):
        if series.family.name.endswith("_other_activity_seconds_total"):
            continue
        for labels, _ in series.rows:
            places = dict(zip(series.label_names, labels, strict=True))
            if series.family.name.startswith("gpu_training_"):
                place = "training " + places["uuid"] + places["mig_uuid"]
            elif series.family.name == "gpu_allocation_cause_value":
                place = "causes " + places["uuid"] + places["mig_uuid"]
            elif series.family.name.startswith("gpu_allocation_"):
                place = "allocation " + places["uuid"] + places["mig_uuid"]
            elif places.get("mig_uuid"):
                place = "mig " + places["mig_uuid"]
            else:
                place = "gpu " + places.get("uuid", "none")
            count[place] = count.get(place, 0) + 1
    for kind, budget in (("gpu GPU", 64), ("mig", 24), ("allocation", 24), ("causes", 6), ("training", 13)):
        numbers = [number for place, number in count.items() if place.startswith(kind)]
        assert numbers
        advise(f"series of one {kind}", max(numbers), budget, so="drop one")


def test_answers_about_eleven_gpus_stay_within_their_bytes(view: View) -> None:
    """Prometheus stores the one at every scrape, and `top` reads the other from each node every two seconds."""
    assert len(view.gpus) == 11
    advise("bytes of /metrics", len(TextRenderer().render(list_series(view))), 150_000, so="drop a family or a label")
    advise("bytes of the status", len(render_json(view)), 40_000, so="drop a key")


def test_the_page_loads_nothing_from_other_servers(node: SimulatedNode) -> None:
    page = render_page(node.view(), node.state.history)
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "does not answer" not in page.partition("<script>")[0], "text browsers show hidden elements"
    assert re.findall("<(?:script|link|img|iframe|object)[^>]*>", page) == ["<script>"], (
        "only the script of the page itself"
    )


def test_a_page_with_56_holders_has_at_most_100_kb() -> None:
    parts = [{"profile": "1g.10gb", "load": {"kind": "square", "high": 0.9, "period": 40}}] * 7
    holders = [
        {
            "gpu": gpu,
            "mig": mig,
            "kind": "pod",
            "name": f"namespace-of-a-team/a-pod-of-the-usual-length-{gpu}-{mig}-x2x9p/main",
        }
        for gpu in range(8)
        for mig in range(7)
    ]
    node = play(parse_scenario({"gpus": [{"model": "H100", "mig": parts}] * 8, "holders": holders}), 700)
    page = render_page(node.view(), node.state.history)
    assert page.count("<svg") == 56
    advise("bytes of the page", len(page.encode()), 100_000, so="shorten what each row repeats")


def test_names_from_users_cannot_break_the_page() -> None:
    scenario = parse_scenario(
        {
            "gpus": [{"model": "H100"}],
            "holders": [{"gpu": 0, "kind": "pod", "name": "<script>alert(1)</script".replace("/", "") + '/a&b/"c'}],
        }
    )
    page = render_page(play(scenario, 60).view(), no_history)
    assert page.count("<script>") == 1
    assert "alert(1)" not in page.partition("<script>")[2]
    assert "&lt;script&gt;alert(1)" in page


def test_a_lost_gpu_is_shown_as_lost_and_only_its_series_are_absent() -> None:
    faults = [{"at": 0, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}]
    scenario = parse_scenario({"gpus": [{"model": "H100"}, {"model": "H100", "faults": faults}]})
    view = play(scenario, 60).view()
    text = TextRenderer().render(list_series(view))
    up = re.findall(r'gpu_up\{gpu="(\d)".*\} (\d)', text)
    assert up == [("0", "1"), ("1", "0")]
    assert re.findall(r'gpu_power_watts\{gpu="(\d)"', text) == ["0"]
    assert "lost" in render_table(view)


def test_json_matches_its_published_schema(view: View) -> None:
    schema = json.loads((ROOT / "docs" / "status.schema.json").read_text("utf-8"))
    lost = parse_scenario(
        {"gpus": [{"model": "H100", "faults": [{"at": 0, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}]}]}
    )
    old = parse_scenario({"gpus": [{"model": "T4"}], "holders": [{"gpu": 0, "kind": "job", "name": "7"}]})
    for each in (view, play(lost, 60).view(), play(lost, 0).view(), play(old, 0).view()):
        jsonschema.validate(json.loads(render_json(each)), schema)
    answer = json.loads(render_json(view))
    for broken in (answer | {"more": 1}, {key: value for key, value in answer.items() if key != "gpus"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_the_table_is_made_from_the_json_alone(view: View) -> None:
    rows = list(join_rows(json.loads(render_json(view))))
    lines = render_table(view).splitlines()[1:]
    assert [row.gpu for row in rows] == [line.split()[0] for line in lines[: len(rows)]]
    by_gpu = {row.gpu: row for row in rows}
    held = by_gpu["1"]
    assert (held.holder, held.owner, held.state) == ("job 48113", "mira/phys", "held_no_process")
    assert (held.idle_s or 0.0) > 1700 and held.utilization == 0.0
    assert (by_gpu["6:3/0"].state, by_gpu["6:3/0"].held_s) == ("free", None)
    throttling = by_gpu["4"].throttling
    assert throttling is not None and throttling.reason == "hw_thermal" and 0.35 < throttling.ratio < 0.4
    assert by_gpu["0"].throttling == ("thermal", 0.0)
    assert by_gpu["6:1/0"].throttling is None, "an instance has no throttle counters"


@pytest.mark.parametrize("call", ["*", "nvmlDeviceGetPowerUsage"])
def test_the_rows_of_a_gpu_with_a_fault_are_those_of_its_json(call: str) -> None:
    faults = [{"at": 30, "call": call, "error": "NVML_ERROR_GPU_IS_LOST" if call == "*" else "NVML_ERROR_UNKNOWN"}]
    mig = [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]
    gpus = [{"model": "H100", "faults": faults}, {"model": "H100", "mig": mig, "faults": faults}]
    holders = [{"gpu": 0, "kind": "job", "name": "7"}, {"gpu": 1, "mig": 0, "kind": "job", "name": "8"}]
    view = play(parse_scenario({"gpus": gpus, "holders": holders}), 60).view()
    assert list(join_rows(json.loads(render_json(view)))) == list_rows(view)
    gpu = json.loads(render_json(view))["gpus"][0]
    if call == "*":
        assert (gpu["state"], gpu["reason"], gpu["advice"]) == ("lost", "", STATES["lost"].site) and gpu["error"]
    else:
        assert (gpu["state"], gpu["error"], gpu["advice"]) == ("held", "", "") and "UNKNOWN" in gpu["read_error"]


def test_the_age_of_a_gpu_is_that_of_its_last_reading(view: View) -> None:
    faults = [{"at": 30, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}]
    node = play(
        parse_scenario({"gpus": [{"model": "H100"}, {"model": "H100", "faults": faults}, {"model": "H100"}]}), 60
    )
    node.hung.add(node.samplers[2].device.identity.uuid)
    answer = json.loads(render_json(node.view()))
    assert [gpu["age_seconds"] for gpu in answer["gpus"]] == [0.0, None, 0.0], (
        "a failed answer does not date the values"
    )
    assert [gpu["throttle_ratio"] for gpu in answer["gpus"]] == [0.0, None, None]
