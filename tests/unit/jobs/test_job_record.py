"""The output of sacct: every run once, and no line costs another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common import commands
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reports.jobs import sacct
from gpu_exporter.reports.jobs.names import AskedJob
from gpu_exporter.reports.jobs.sacct import NoRecord, parse_record, read_record

ENDED = (
    "16|16_1|erin|chem|gpu|normal|COMPLETED|0:0|1795995956|1795995959|3|600|billing=1,cpu=1,gres/gpu=1,mem=1M,node=1|n0"
)
CANCELLED = "104|104|erin|chem|gpu|normal|CANCELLED by 1000|0:15|1795995000|1795995100|100|UNLIMITED|gres/gpu:h100=2,gres/gpu:l4=1|n[0-1]"
RUNNING = "105|105|erin|chem|gpu||RUNNING|0:0|1795996000|Unknown|40|10|gres/gpu=4,gres/gpu:h100=4|n0"
PENDING = "106|106_[2-9]|erin|chem|gpu||PENDING|0:0|Unknown|Unknown|0|10||None assigned"
NO_GPU = "107|107|erin|chem|cpu||COMPLETED|0:0|1795996000|1795996010|10|10|cpu=4|n0"


def test_every_run_that_began_is_read() -> None:
    ended, cancelled, running, without = parse_record("\n".join((ENDED, CANCELLED, RUNNING, PENDING, NO_GPU)))
    assert (ended.raw, ended.name, ended.gpus, ended.elapsed_s, ended.limit_s) == ("16", "16_1", 1.0, 3.0, 36000.0)
    assert (cancelled.state, cancelled.exit_code, cancelled.gpus, cancelled.limit_s) == ("CANCELLED", "0:15", 3.0, None)
    assert (running.end, running.gpus, running.qos) == (None, 4.0, "")
    assert without.gpus == 0.0


def test_a_long_list_of_resources_or_nodes_is_read_to_its_end() -> None:
    tres = (
        "billing=128,cpu=128,energy=471112345,fs/disk=1099511627776,gres/gpu:nvidia_h100_80gb_hbm3=8,gres/gpu=8,node=9"
    )
    nodes = ",".join(f"rack{7 * number}-gpu{number}" for number in range(20))
    (run,) = parse_record(CANCELLED.replace("gres/gpu:h100=2,gres/gpu:l4=1", tres).replace("n[0-1]", nodes))
    assert (run.gpus, run.nodes) == (8.0, nodes)


@given(st.lists(st.text(alphabet="0123456789|abgres/=,:+_ \nUnknown\x1b", max_size=120), max_size=8))
def test_any_output_can_be_read_and_costs_no_other_line(lines: list[str]) -> None:
    text = "\n".join([*lines, ENDED])
    runs = parse_record(text)
    assert runs[-1] == parse_record(ENDED)[0]
    assert all(run.name.isprintable() and run.elapsed_s >= 0.0 for run in runs)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: commands.Done | Exception) -> None:
    def run(command: object, timeout_s: float, limit: int) -> commands.Done:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(sacct, "run_slurm", run)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (commands.NotFound("sacct is not on PATH"), NoRecord),
        (commands.Done(1, "", "Slurm accounting storage is disabled"), NoRecord),
        (commands.Done(1, "", "sacct: error: slurm_persist_conn_open: Connection refused"), AnswerError),
        (commands.TooSlow("sacct did not answer within 30 s"), AnswerError),
    ],
)
def test_a_site_without_slurmdbd_is_no_fault_and_a_silent_slurmdbd_is_one(
    answer: commands.Done | Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, answer)
    with pytest.raises(AnswerError) as caught:
        read_record(AskedJob("16"), 0.0)
    assert type(caught.value) is kind
