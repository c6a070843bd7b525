"""Jobs that are known from the prolog's files alone: slurmctld is not asked, and nothing is guessed."""

from __future__ import annotations

import os
import re
import time

import pytest
from tests.unit.attribution.filed_jobs import AWAY, START, asked, begin, end, end_and_say, held, poll
from tests.unit.attribution.slurm_cluster import SLOW, fail
from tests.unit.attribution.slurm_quiet_node import Filing

from gpu_exporter.agent.attribution.slurm.filed import FILL_S
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Allocation
from gpu_exporter.common.model.units import UnitId

RULES = LedgerRules(
    poll_interval_s=5.0, stale_after_polls=3, low_ratio=0.1, high_ratio=0.7, idle_run_unknown_reset_s=60.0
)


def test_jobs_begin_and_end_without_a_question_to_slurmctld(filing: Filing) -> None:
    fail(filing, "sinfo", AWAY)
    filing.asked.clear()
    begin(filing, "7", "0,2")
    (first, second) = poll(filing).grants
    holder = first.holder
    assert (first.device, second.device) == ("0", "2")
    assert (holder.user, holder.uid, holder.account, holder.partition) == ("ada", "1000", "chem", "gpu")
    assert (holder.start_wall, holder.units, holder.key.incarnation) == (START, 2, f"lab/7/0/{START}")
    assert first.witnesses == "step, prolog"
    begin(filing, "8", "1", start=START + 9)
    assert held(poll(filing)) == {"7": ["0", "2"], "8": ["1"]}
    end(filing, "7")
    begin(filing, "9", "0", start=START + 20)
    answer = poll(filing)
    assert (held(answer), answer.problem, answer.is_late) == ({"8": ["1"], "9": ["0"]}, "", False)
    for job in ("8", "9"):
        end(filing, job)
    answer = poll(filing)
    assert (held(answer), answer.problem) == ({}, "")
    assert asked(filing) == []


def test_a_long_job_is_asked_about_once_for_what_no_prolog_is_told(filing: Filing) -> None:
    begin(filing, "7", "0")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    filing.columns = {"QOS": "high", "Account": "chem", "Partition": "gpu", "ArrayJobID": "6", "ArrayTaskID": "3"}
    filing.asked.clear()
    keys = set()
    for _ in range(int(FILL_S / 5) + 3):
        (grant,) = poll(filing).grants
        keys.add(grant.holder.key)
    assert (grant.holder.qos, grant.holder.array_task_id, grant.witnesses) == ("high", "3", "step, prolog, slurmctld")
    assert len(keys) == 1, "the holder is the same before and after"
    before = len(asked(filing))
    assert 1 <= before <= 3
    for _ in range(500):
        poll(filing)
    filing.jobs, filing.used = {}, ""
    end(filing, "7")
    assert held(poll(filing)) == {}
    assert len(asked(filing)) == before


@pytest.mark.parametrize(
    "words",
    [
        {"user": ""}, {"uid": ""}, {"restarts": ""}, {"nodes": ""}, {"cluster": ""},
        {"cluster": "other"}, {"nodes": "2"}, {"user": "a b"}, {"account": "x;y"}, {"start": "soon"}, {"uid": "-1"},
        {"start": "9" * 30},
    ],
)  # fmt: skip
def test_an_incomplete_file_leads_to_a_question(filing: Filing, words: dict[str, str]) -> None:
    begin(filing, "7", "1", **words)
    filing.jobs, filing.used = {"7": ["gpu:h100:1(IDX:1)"]}, "gpu:h100:1(IDX:1)"
    filing.asked.clear()
    assert held(poll(filing)) == {"7": ["1"]}
    assert asked(filing)


def test_before_slurm_23_02_a_job_began_when_its_prolog_ran(filing: Filing) -> None:
    """Such a Slurm does not tell the prolog when the job started."""
    began = START + 0.5
    begin(filing, "7", "1", start=0)
    filing.file("7", (filing.files / "7").read_text().replace("start=0\n", ""), filing.clock.wall() - began)
    filing.asked.clear()
    (grant,) = poll(filing).grants
    assert (grant.device, grant.holder.start_wall, grant.holder.key.incarnation) == ("1", START, f"lab/7/0/{START}")
    assert asked(filing) == []
    filing.jobs, filing.used, filing.job_start = {"7": ["gpu:h100:1(IDX:1)"]}, "gpu:h100:1(IDX:1)", START - 1
    filing.clock.advance(START)
    (grant,) = poll(filing).grants
    assert grant.holder.start_wall == START - 1, "slurmctld takes precedence"
    assert grant.holder.key.incarnation == f"lab/7/0/{START}", "it is the same holder"
    filing.job_start = START + 900
    filing.clock.advance(START)
    (grant,) = poll(filing).grants
    assert grant.holder.key.incarnation == f"lab/7/0/{START + 900}", "the file is of an earlier job with that number"
    assert asked(filing)


@pytest.mark.parametrize(
    "line",
    [
        "Name=shard Count=4 File=/dev/nvidia1",
        "Name=shard Count=4 File=/dev/nvidia[0-1]",
        "Name=shard Count=4 File=/dev/other",
        "Name=shard Count=4 File=/dev/nvidia9",
        "Name=shard Count=4 MultipleFiles=/dev/nvidia0",
        "Name=mps Count=100",
        "NodeName=n[0-3] Name=shard",
    ],
)
def test_a_file_with_a_gpu_that_jobs_can_share_does_not_count_alone(filing: Filing, line: str) -> None:
    with filing.gres_conf.open("a") as file:
        file.write(line + "\n")
    poll(filing)
    begin(filing, "7", "1")
    filing.jobs, filing.used = {"7": ["shard:h100:1(0/0,1/4,0/4,0/4)"]}, "shard:h100:1(0/0,1/4,0/4,0/4)"
    filing.asked.clear()
    answer = poll(filing)
    assert [(grant.device, grant.share) for grant in answer.grants] == [("1", "shard")]
    assert asked(filing)


def test_a_file_with_gpus_that_jobs_cannot_share_counts_beside_shared_gpus(filing: Filing) -> None:
    with filing.gres_conf.open("a") as file:
        file.write("Name=shard Count=8 File=/dev/nvidia[2-3]\n")
    poll(filing)
    filing.jobs, filing.used = {"5": ["shard:h100:1(0/0,0/0,1/4,0/4)"]}, "shard:h100:1(0/0,0/0,1/4,0/4)"
    begin(filing, "5", "2")
    poll(filing)
    fail(filing, "sinfo", AWAY)
    filing.asked.clear()
    begin(filing, "7", "0-1")
    begin(filing, "8", "1,3", start=START + 1)
    answer = poll(filing)
    found = {grant.holder.job_id: (grant.device, grant.share) for grant in answer.grants}
    assert found == {"7": ("1", ""), "5": ("2", "shard")}
    assert [text for text in asked(filing) if "squeue" in text] == []


@pytest.mark.parametrize(("mps", "counts"), [("mps=\n", True), ("mps=yes\n", False), ("", False)])
@pytest.mark.parametrize("line", ["Name=mps Count=400", "Name=mps Count=100 File=/dev/nvidia1"])
def test_beside_mps_a_file_counts_alone_only_if_the_prolog_wrote_that_the_job_has_no_mps(
    filing: Filing, line: str, mps: str, counts: bool
) -> None:
    with filing.gres_conf.open("a") as file:
        file.write(line + "\n")
    poll(filing)
    begin(filing, "7", "1")
    path = filing.files / "7"
    path.write_text(path.read_text() + mps)
    os.utime(path, (filing.clock.wall(), filing.clock.wall()))
    fail(filing, "sinfo", AWAY)
    assert held(poll(filing)) == ({"7": ["1"]} if counts else {})


def test_a_job_with_mps_that_a_file_follows_has_ended(filing: Filing) -> None:
    with filing.gres_conf.open("a") as file:
        file.write("Name=mps Count=100 File=/dev/nvidia1\n")
    poll(filing)
    filing.jobs, filing.used = {"5": ["mps:h100:10(0/0,10/100,0/0,0/0)"]}, "mps:h100:10(0/0,10/100,0/0,0/0)"
    begin(filing, "5", "1", mps="yes")
    assert [(grant.device, grant.share) for grant in poll(filing).grants] == [("1", "mps")]
    end(filing, "5")
    fail(filing, "sinfo", AWAY)
    begin(filing, "7", "1", start=START + 60)
    path = filing.files / "7"
    path.write_text(path.read_text() + "mps=\n")
    os.utime(path, (filing.clock.wall(), filing.clock.wall()))
    assert held(poll(filing)) == {"7": ["1"]}


def test_shares_on_another_node_do_not_affect_this_node(filing: Filing) -> None:
    with filing.gres_conf.open("a") as file:
        file.write("NodeName=n7 Name=shard Count=4\n")
    poll(filing)
    begin(filing, "7", "1")
    filing.asked.clear()
    assert held(poll(filing)) == {"7": ["1"]}
    assert asked(filing) == []


def test_while_gres_conf_is_written_no_file_counts_alone(filing: Filing) -> None:
    """The line about shards is the last one, and may not be written yet."""
    gpus = filing.gres_conf.read_text("utf-8")
    written = (*[f"{gpus}Name=shard Count=4\n"] * 2, gpus, f"{gpus}Name=shard Count=4\n", gpus, gpus)
    counts = []
    for number, text in enumerate(written):
        filing.gres_conf.write_text(text, "utf-8")
        os.utime(filing.gres_conf, (filing.slurmd_start + number, filing.slurmd_start + number))
        poll(filing)
        counts.append(filing.source._filed.shares)
    assert [shares == {} for shares in counts] == [False] * 5 + [True]


def test_another_run_of_a_job_is_another_holder_with_other_gpus(filing: Filing) -> None:
    begin(filing, "7", "0")
    (before,) = poll(filing).grants
    end(filing, "7")
    begin(filing, "7", "3", restarts=1, start=START + 60)
    filing.asked.clear()
    (after,) = poll(filing).grants
    assert (before.device, after.device) == ("0", "3")
    assert before.holder.key != after.holder.key
    assert asked(filing) == []


def test_each_end_is_reported_once_with_its_time(filing: Filing, now: float) -> None:
    begin(filing, "7", "0,1", start=filing.slurmd_start + 1)
    assert held(filing.source.poll()) == {"7": ["0", "1"]}
    begin(filing, "8", "2", start=filing.slurmd_start + 1)  # no poll has seen this job
    before = time.time()
    end_and_say(filing, "7")
    end_and_say(filing, "8")
    took = time.time() - before
    filing.clock.advance(5.0)
    answer = filing.source.poll()
    assert (held(answer), answer.missed) == ({}, 0)
    assert sorted((grant.holder.job_id, grant.device, grant.holder.user) for grant in answer.ended) == [
        ("7", "0", "ada"), ("7", "1", "ada"), ("8", "2", "ada")
    ]  # fmt: skip
    for grant in answer.ended:
        assert 0.0 < filing.clock.monotonic() - grant.confirmed <= 6.0 + took
    filing.clock.advance(5.0)
    assert filing.source.poll().ended == ()


def test_a_job_has_ended_even_if_its_processes_still_run(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    filing.source.poll()
    end_and_say(filing, "7")
    filing.steps = {"7": {1007}}
    filing.asked.clear()
    answer = filing.source.poll()
    assert (held(answer), [grant.device for grant in answer.ended]) == ({}, ["0"])
    assert (answer.problem, asked(filing)) == ("", [])


def test_a_new_run_of_a_job_is_not_the_run_that_ended(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    (first,) = filing.source.poll().grants
    end_and_say(filing, "7")
    begin(filing, "7", "1", start=filing.slurmd_start + 3, restarts=1)
    answer = filing.source.poll()
    assert [grant.holder.key for grant in answer.ended] == [first.holder.key]
    assert held(answer) == {"7": ["1"]}
    end_and_say(filing, "7")
    begin(filing, "7", "2", start=filing.slurmd_start + 5, restarts=2)
    end_and_say(filing, "7")
    answer = filing.source.poll()
    runs = [(grant.device, grant.holder.key.incarnation.split("/")[2]) for grant in answer.ended]
    assert runs == [("1", "1"), ("2", "2")], "each run has a file"


@pytest.mark.parametrize("words", [{"user": ""}, {"cluster": "other"}])
def test_an_ended_job_that_was_not_seen_and_has_an_incomplete_file_is_counted(
    filing: Filing, now: float, words: dict[str, str]
) -> None:
    begin(filing, "7", "0", **words)
    end_and_say(filing, "7")
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 1)
    assert filing.source.poll().missed == 0
    assert filing.steps == {}


@pytest.mark.parametrize(
    ("line", "words", "share"),
    [
        ("Name=shard Count=8 File=/dev/nvidia[0-1]", {}, "shard"),
        ("Name=shard Count=8 File=/dev/nvidia[2-3]", {}, ""),
        ("Name=mps Count=400", {"mps": "yes"}, "mps"),
        ("Name=mps Count=400 # the prolog is an older one", {}, "shard"),
        ("# on two nodes", {"nodes": "2"}, ""),
    ],
)
def test_an_ended_job_that_slurmctld_never_reported_gets_its_hours_on_every_kind_of_gpu(
    filing: Filing, now: float, line: str, words: dict[str, str], share: str
) -> None:
    with filing.gres_conf.open("a") as file:
        file.write(line + "\n")
    filing.source.poll()
    begin(filing, "7", "0,1", **words)
    end_and_say(filing, "7")
    answer = filing.source.poll()
    shown = [(grant.holder.job_id, grant.device, grant.share) for grant in answer.ended]
    assert (shown, answer.missed) == ([("7", "0", share), ("7", "1", share)], 0)
    assert {grant.holder.units for grant in answer.ended} == {None if words.get("nodes") else 2}


@pytest.mark.parametrize("words", [{}, {"nodes": "2"}])
def test_a_job_with_shards_has_its_hours_from_its_start_while_slurmctld_is_too_slow_to_list_it(
    filing: Filing, now: float, words: dict[str, str]
) -> None:
    """sinfo reports the GPU in use, squeue does not answer in time: no nameless holder gets these hours."""
    with filing.gres_conf.open("a") as file:
        file.write("Name=shard Count=8 File=/dev/nvidia[0-1]\n")
    filing.source.poll()
    start = filing.slurmd_start + 1
    filing.clock.advance(start - now)
    ledger = Ledger(RULES, filing.clock.monotonic())

    def charge() -> Answer:
        filing.clock.advance(5.0)
        at, answer = filing.clock.monotonic(), filing.source.poll()
        offset = filing.clock.wall() - at
        entries = [
            [
                ConfirmedAllocation(
                    Allocation(UnitId(grant.device), grant.holder, grant.share or "none", running=grant.running),
                    grant.confirmed or at,
                    None if grant.start_here is None else grant.start_here - offset,
                    renewed_s=grant.renewed_s,
                )
                for grant in grants
            ]
            for grants in (answer.grants, answer.ended)
        ]
        ledger.charge_poll(at, offset + at, *entries)
        return answer

    charge()
    begin(filing, "7", "1", start=start, **words)
    filing.begin(j7="gpu:h100:1(IDX:1)")
    filing.steps = {"7": {1007}}
    fail(filing, "squeue", SLOW)
    for _ in range(3):
        answer = charge()
        assert [(grant.holder.job_id, grant.device, grant.share) for grant in answer.grants] == [("7", "1", "shard")]
    filing.jobs, filing.used = {}, ""
    fail(filing, "sinfo", AWAY, times=4)  # the GPU then has a holder without a name, until slurmctld answers
    end_and_say(filing, "7")
    (kept,) = (filing.files / ".ended").iterdir()
    end_wall = int(filing.clock.wall())
    kept.write_text(re.sub(r"(?m)^end=.*", f"end={end_wall}", kept.read_text()))
    ended = charge()
    assert ([grant.holder.job_id for grant in ended.ended], ended.missed) == (["7"], 0)
    while found := charge().grants:
        assert [grant.holder.identity for grant in found] == ["hidden"]
    hours = {(tenant.account, tenant.user): totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert hours == {("chem", "ada"): pytest.approx(end_wall - start), ("", ""): 0.0}
    assert end_wall - start > 15


def test_a_job_whose_epilog_has_run_holds_nothing_while_slurmctld_still_lists_it(filing: Filing, now: float) -> None:
    """Its GPU is not free, because Slurm reports it as in use."""
    begin(filing, "7", "0", nodes="2")
    filing.begin(j7="gpu:h100:1(IDX:0)")
    filing.steps = {"7": {1007}}
    (grant,) = poll(filing).grants
    assert grant.holder.job_id == "7"
    jobs, used = filing.jobs, filing.used
    end_and_say(filing, "7")
    filing.jobs, filing.used = jobs, used
    assert [grant.holder.job_id for grant in poll(filing).ended] == ["7"]
    for _ in range(15):
        (grant,) = poll(filing).grants
        assert grant.holder.identity == "hidden"
    filing.begin(j8="gpu:h100:1(IDX:0)")
    begin(filing, "8", "0", nodes="2")
    (grant,) = poll(filing).grants
    assert grant.holder.job_id == "8"


def test_a_changed_file_of_an_ended_job_does_not_end_it_again(filing: Filing, now: float) -> None:
    """As `restorecon -R /run` and `chown -R` do, while the exporter restarts."""
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    assert [grant.holder.job_id for grant in filing.source.poll().ended] == ["7"]
    (kept,) = (filing.files / ".ended").iterdir()
    kept.chmod(0o600)
    os.utime(kept, (1.0, 1.0))
    assert filing.source.poll().ended == ()
    filing.restart()
    filing.source.poll()
    kept.chmod(0o644)
    assert filing.source.poll().ended == ()


def test_each_end_is_reported_once_even_if_the_clock_is_set_back(filing: Filing, now: float) -> None:
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    assert len(filing.source.poll().ended) == 1
    filing.clock = ManualClock(wall=time.time() - 3600.0)
    filing.source._clock = filing.source._presence._clock = filing.clock
    assert filing.source.poll().ended == ()
    begin(filing, "8", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "8", is_now=False)
    (grant,) = filing.source.poll().ended
    assert (grant.holder.job_id, grant.confirmed) == ("8", filing.clock.monotonic()), "not later than now"
    assert filing.source.poll().ended == ()


def test_ends_are_reported_when_slurm_answers_for_the_first_time(filing: Filing, now: float) -> None:
    filing.restart()
    failed = fail(filing, "config", AWAY)
    begin(filing, "7", "0", start=filing.slurmd_start + 1)
    end_and_say(filing, "7")
    with pytest.raises(SourceError):
        filing.source.poll()
    assert failed
    filing.source._controller._run_command = filing.run  # type: ignore[union-attr]
    filing.clock.advance(60.0)
    answer = filing.source.poll()
    assert ([grant.holder.job_id for grant in answer.ended], answer.missed) == (["7"], 0)


def test_ends_before_the_exporters_start_are_not_reported(filing: Filing) -> None:
    begin(filing, "7", "0")
    end_and_say(filing, "7")
    filing.clock = ManualClock(wall=time.time() + 60.0)
    filing.restart()
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 0)


@pytest.mark.parametrize("body", ["", "job=8\n", "job=x\ngpus=0\n", "gpus=0\n", "job=7\ngpus=9-\n", "\0" * 5000])
def test_files_that_gpu_exporters_epilog_did_not_write_report_no_end(filing: Filing, now: float, body: str) -> None:
    ended = filing.files / ".ended"
    ended.mkdir(mode=0o755)
    (ended / "7").write_text(body)
    (ended / "9").symlink_to("/etc/passwd")
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 2)
    ended.chmod(0o777)
    answer = filing.source.poll()
    assert (answer.ended, answer.missed) == ((), 0)
    assert "/.ended: not read, because other users can write to it" in answer.notice


def test_a_reused_job_number_is_another_holder(filing: Filing) -> None:
    """As after slurmctld lost its state."""
    filing.jobs, filing.used, filing.job_start = {"7": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)", START
    begin(filing, "7", "0", user="")
    (before,) = poll(filing).grants
    assert before.holder.start_wall == START
    begin(filing, "7", "1", start=START + 900)
    (after,) = poll(filing).grants
    assert (after.device, after.holder.start_wall) == ("1", START + 900)
    assert before.holder.key != after.holder.key


def test_processes_that_start_and_end_lead_to_no_question(filing: Filing) -> None:
    begin(filing, "7", "0")
    poll(filing)
    filing.asked.clear()
    for pid in range(2000, 2010):
        filing.steps = {"7": {pid}}
        assert held(poll(filing)) == {"7": ["0"]}
    assert asked(filing) == []


def test_if_slurm_counts_gpus_without_positions_its_count_takes_precedence_over_files(filing: Filing) -> None:
    filing.gres_conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n", "utf-8")
    filing.configured, filing.used = "gpu:4", "gpu:1"
    filing.jobs = {"5": ["gpu:1(IDX:0)"]}
    begin(filing, "5", "0", user="")
    filing.clock.advance(4000.0)
    begin(filing, "5", "0", user="")
    assert held(poll(filing)) == {"5": ["0"]}
    begin(filing, "7", "1")
    filing.jobs["7"], filing.used = ["gpu:1(IDX:1)"], "gpu:2"
    filing.asked.clear()
    assert held(poll(filing)) == {"5": ["0"], "7": ["1"]}
    assert asked(filing)
