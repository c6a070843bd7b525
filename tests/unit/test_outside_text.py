"""Every parser of text from outside, given a valid outer form with any content: a result, or the parser's own error."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.static import parse_static
from gpu_exporter.agent.devices.scenario import ScenarioError, parse_scenario
from gpu_exporter.agent.inventory.expected import ExpectedDevices
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import HEADER, VERSION, StateFile
from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.load import ConfigError, load_settings
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql.vector import parse_vector
from gpu_exporter.common.web.secure import Security, WebConfigError
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
WORDS = (
    "status data result resultType metric value vector success units holders numbers boot_id unit holder devices version "
    "uuid pod job gpus basic_auth_users policy"
)
KEYS = st.sampled_from(WORDS.split()) | st.text(max_size=8)
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
LABELS = st.dictionaries(
    st.sampled_from(["uuid", "scheduler", "pod", "job_id", "node", "__name__", "exported_pod"]), ANY
)
ROWS = st.lists(
    st.fixed_dictionaries({"metric": LABELS | ANY, "value": st.lists(ANY, max_size=3) | ANY}) | ANY, max_size=4
)
BRIEF = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@BRIEF
@given(
    ANY
    | st.fixed_dictionaries(
        {"status": st.just("success"), "data": st.fixed_dictionaries({"resultType": st.just("vector"), "result": ROWS})}
    )
)
def test_any_answer_of_a_promql_api_gives_a_result_or_the_parsers_error(answer: Any) -> None:
    text = json.dumps(answer)
    try:
        rows = parse_vector(text, "up")
    except AnswerError:
        rows = []
    assert all(isinstance(value, str) for row in rows for value in row.labels.values())

    def fetch(address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        return text

    try:
        PromQLSource(
            PromQLOptions(address=parse_address("http://p"), candidate_after_s=3600.0, window_s=7200.0, matcher=""),
            clock=ManualClock(wall=1e9),
            fetch=fetch,
        ).read_evidence()
    except AnswerError:
        return


NAMES = st.sampled_from(["gpu_allocation_info", "gpu_allocation_idle_run_seconds", "gpu_exporter_build_info", "x"])


def as_line(name: str, labels: dict[str, str], value: str) -> str:
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}"


LINE = st.builds(
    as_line,
    NAMES,
    st.dictionaries(st.sampled_from(["uuid", "pod", "job_id", "scheduler"]), st.text(max_size=8), max_size=3),
    st.sampled_from(["1", "NaN", "1e400", "-1", "", "x", "1 2 3"]),
)


@BRIEF
@given(st.text(max_size=200) | st.lists(LINE | st.text(max_size=30), max_size=6).map("\n".join))
def test_any_page_of_an_exporter_gives_a_result_or_the_parsers_error(text: str) -> None:
    source = ExporterSource([parse_exporter("n1:1")], 7200.0, ManualClock(wall=1e9), lambda _url: text)
    try:
        source.read_evidence()
    except AnswerError as exc:
        assert "internal error" not in str(exc)


@BRIEF
@given(ANY | st.fixed_dictionaries({"boot_id": st.just("b"), "units": ANY, "holders": ANY, "numbers": ANY}))
def test_any_state_file_with_a_correct_checksum_is_handled(tmp_path: Path, data: Any) -> None:
    body = json.dumps(data)
    (tmp_path / "state").write_text(f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}")
    ledger, state = Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0), StateFile(tmp_path, 10.0, "b")
    reason = state.restore(ledger)
    assert reason or not (ledger.units or ledger.holdings) or isinstance(data, dict)
    state.commit(state.prepare(ledger))  # the restored state can be written again
    ledger.charge_poll(1.0, 1e9, [])


@BRIEF
@given(
    ANY | st.fixed_dictionaries({"version": st.just(1), "boot_id": ANY, "devices": ANY, "seen": ANY, "left_out": ANY})
)
def test_any_list_of_devices_is_handled(tmp_path: Path, data: Any) -> None:
    (tmp_path / "devices.json").write_text(json.dumps(data))
    book = ExpectedDevices(tmp_path, "b")
    book.load()
    book.save()


@BRIEF
@given(ANY)
def test_any_yaml_of_a_site_gives_a_result_or_the_parsers_error(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=False))
    for read, error in ((load_settings, ConfigError), (Security, WebConfigError)):
        try:
            read(path)  # type: ignore[operator]
        except error:
            continue


@BRIEF
@given(
    ANY
    | st.lists(
        st.fixed_dictionaries({}, optional=dict.fromkeys(("uuid", "pod", "job", "user", "gpus"), ANY)), max_size=3
    )
)
def test_any_file_of_holders_gives_a_result_or_the_parsers_error(data: Any) -> None:
    try:
        parse_static(data)
    except ValueError:
        return


@BRIEF
@given(
    ANY
    | st.fixed_dictionaries(
        {
            "gpus": st.lists(
                st.fixed_dictionaries({"model": st.just("T4")}, optional={"seed": ANY, "load": ANY, "faults": ANY}),
                max_size=2,
            )
        }
    )
)
def test_any_scenario_gives_a_result_or_the_parsers_error(data: Any) -> None:
    try:
        parse_scenario(data)
    except ScenarioError:
        return
