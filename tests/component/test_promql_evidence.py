"""Evidence from a real Prometheus with hours of history: coverage, witnesses, absent series, renamed labels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reconciler.decision.policy import Decision, decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.spared import why_spared
from gpu_exporter.reconciler.evidence.pause_expression import Pauses
from gpu_exporter.reconciler.evidence.peaks import Peaks
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, HostLimits
from tests.testbed.processes import Processes, run_exporter
from tests.testbed.servers import Prometheus, require, write_history

pytestmark = pytest.mark.servers
POLICY = Policy()
HISTORY_S, SCRAPE_S = 4 * 3600, 15
HOUR = int(time.time()) // 3600 * 3600 - 36 * 3600
Present = Callable[[int], bool]


def job_series(
    job: str, end: int, is_there: Present, known_before: float = 1.0, held_before: int = 20_000, **more: str
) -> list[str]:
    """Four hours of scrapes of one idle GPU. While the exporter is unavailable, held time increases and observed time does not.

    `known_before`: observed share of the `held_before` seconds before that. Every name is unique to the job.
    """
    labels = ",".join(
        f'{key}="{value}"'
        for key, value in {
            "job": "gpu-exporter",
            "node": f"n{job}",
            "instance": f"n{job}",
            "gpu": "0",
            "uuid": f"GPU-{job}",
            "scheduler": "slurm",
            "job_id": job,
            **more,
        }.items()
    )
    place = f'job="gpu-exporter",node="n{job}",instance="n{job}"'
    lines = []
    observed = known_before * held_before
    for second in range(HISTORY_S + 1):
        observed += is_there(second)
        if second % SCRAPE_S or not is_there(second):
            continue
        at = end - HISTORY_S + second
        lines += [
            f"gpu_allocation_held_seconds_total{{{labels}}} {held_before + second} {at}",
            f"gpu_allocation_observed_seconds_total{{{labels}}} {observed} {at}",
        ]
        if second >= HISTORY_S - 120:
            lines += [
                f"gpu_allocation_info{{{labels}}} 1 {at}",
                f"gpu_allocation_start_timestamp_seconds{{{labels}}} {end - HISTORY_S - held_before} {at}",
                f"gpu_allocation_idle_run_seconds{{{labels}}} 8000 {at}",
                f"gpu_allocation_idle_run_witnesses{{{labels}}} 4 {at}",
                f"gpu_allocation_holder_units{{{labels}}} 1 {at}",
                f"gpu_exporter_build_info{{{place}}} 1 {at}",
                f"gpu_exporter_last_sample_timestamp_seconds{{{place}}} {at} {at}",
                f"gpu_exporter_sample_interval_seconds{{{place}}} 1 {at}",
            ]
    return lines


def twin_counters(job: str, scrapes: range, observed: float) -> list[str]:
    """A second target with the GPU of `job` at these times. It has observed this share of them."""
    labels = f'job="gpu-exporter",node="twin",instance="twin",gpu="0",uuid="GPU-{job}",scheduler="slurm",job_id="{job}"'
    return [
        f"gpu_allocation_{name}_seconds_total{{{labels}}} {share * (at - scrapes.start)} {at}"
        for at in scrapes
        for name, share in (("held", 1.0), ("observed", observed))
    ]


def days_before(hour: int) -> list[str]:
    """GPUs that became idle at ten past an hour on earlier days. Seven days before, they became idle during the whole hour.

    Each GPU has two targets. No GPU became idle on the second day, and Prometheus was down on the sixth.
    """
    lines = []
    for day, gpus in ((1, 12), (2, 0), (3, 100), (4, 9), (5, 11), (7, 10)):
        for second in range(0, 3 * 3600, 240):
            at = hour - day * 86_400 + second
            for target in ("a", "b"):
                labels = f'job="usual",instance="{target}",scheduler="slurm",job_id="1"'
                lines.append(f'gpu_allocation_info{{{labels},uuid="GPU-0"}} 1 {at}')
                for gpu in range(gpus if second >= 600 else 0):
                    begun = 3600 * gpu / gpus if day == 7 else 600
                    if second >= begun:
                        run = f'gpu_allocation_idle_run_seconds{{{labels},uuid="GPU-{gpu}"}}'
                        lines.append(f"{run} {second - begun} {at}")
    return lines


DAYS_HELD, DAY_STEP_S = 8, 240
Load = Callable[[int], float | None]  # utilization by hours before the end; None while nothing is observed
SERVERS: dict[str, tuple[float, int, list[Load]]] = {  # share of the GPU, days held, and the load of each GPU
    "quiet": (1.0, 8, [lambda hour: 0.11 if hour % 24 < 8 else 0.0]),
    "peak": (1.0, 8, [lambda hour: 0.24 if hour == 90 else 0.01]),  # one busy hour in the week
    "older-peak": (1.0, 8, [lambda hour: 0.9 if hour > 169 else 0.01]),
    "young": (1.0, 6, [lambda hour: 0.01]),
    "unseen": (1.0, 8, [lambda hour: None if 50 <= hour < 60 else 0.01]),  # 158 of 168 hours
    "nearly": (1.0, 8, [lambda hour: None if 50 <= hour < 57 else 0.01]),
    "shared": (0.5, 8, [lambda hour: 0.01]),
    "busy": (1.0, 8, [lambda hour: 0.4]),
    "two": (1.0, 8, [lambda hour: 0.01, lambda hour: 0.02]),
    "second-busy": (1.0, 8, [lambda hour: 0.01, lambda hour: 0.3]),
    "second-unknown": (1.0, 8, [lambda hour: 0.01, lambda hour: None]),
}


def servers(end: int) -> list[str]:
    """The counters of the GPUs of serving pods."""
    lines = []
    for pod, (share, days, loads) in SERVERS.items():
        for gpu, load in enumerate(loads):
            labels = f'job="serving",node="n",instance="n",gpu="{gpu}",uuid="GPU-{pod}-{gpu}"'
            labels += f',scheduler="kubernetes",namespace="ml",pod="{pod}",container="c"'
            busy = observed = 0.0
            for at in range(end - days * 86_400, end + 1, DAY_STEP_S):
                ratio = load((end - at) // 3600)
                observed += 0.0 if ratio is None else DAY_STEP_S
                busy += (ratio or 0.0) * DAY_STEP_S
                lines += [
                    f"gpu_allocation_busy_seconds_total{{{labels}}} {busy} {at}",
                    f"gpu_allocation_observed_seconds_total{{{labels}}} {observed} {at}",
                ]
            lines += [
                f"gpu_allocation_share_ratio{{{labels}}} {share} {end}",
                f'gpu_allocation_info{{{labels},pod_uid="uid"}} 1 {end}',
            ]
    return [*lines, f'gpu_exporter_build_info{{job="serving"}} 1 {end}']


def silent(end: int) -> list[str]:
    """Jobs of exporters that stopped half an hour ago. Two jobs have moved: to another exporter of the same GPU, and, after
    a requeue, to another node. One exporter stopped more than an hour ago.
    """
    lines: list[str] = []
    for job, node, uuid, start, first, last in (
        ("31", "n31", "GPU-31", end - 9000, 3000, 1800),
        ("32", "n32", "GPU-32", end - 9000, 3000, 1800),
        ("32", "n32-new", "GPU-32", end - 9000, 1800, 0),
        ("33", "n33", "GPU-33", end - 9000, 3000, 1800),
        ("33", "n34", "GPU-34", end - 1000, 1000, 0),
        ("35", "n35", "GPU-35", end - 9000, 9000, 4000),
    ):
        place = f'job="silent",node="{node}",instance="{node}:9836"'
        labels = f'{place},gpu="0",uuid="{uuid}",scheduler="slurm",job_id="{job}"'
        for at in range(end - first, end - last + 1, SCRAPE_S):
            lines += [
                f'gpu_exporter_build_info{{{place},version="{1 + (end - at) // 2400}"}} 1 {at}',
                f'gpu_allocation_info{{{labels},source="slurm",user="u{(end - at) // 2400}"}} 1 {at}',
                f"gpu_allocation_start_timestamp_seconds{{{labels}}} {start} {at}",
            ]
    return lines


def write_series(directory: Path, end: int) -> None:
    """The blocks of a Prometheus that scraped these jobs until `end` (Unix seconds)."""
    flaps: Present = lambda second: second % 120 < 70 or second > HISTORY_S - 60  # noqa: E731
    late: Present = lambda second: second > HISTORY_S - 600  # noqa: E731
    lines = [
        *job_series("1", end, lambda second: True),
        *job_series("2", end, flaps),
        *job_series("3", end, late),
        *job_series("4", end, late, known_before=1.0, held_before=0),
        *job_series("13", end, lambda second: True, array_job_id="10", array_task_id="1"),
        *job_series("5", end, lambda second: True),
        *job_series("7", end, lambda second: True),
        *twin_counters("7", range(end - 600, end + 1, SCRAPE_S), 1.0),
        *job_series("8", end, lambda second: True),
        *twin_counters("8", range(end - 7000, end - 3600, SCRAPE_S), 0.7),
    ]
    at = end - 15
    # A second row of witnesses for job 5, from a second exporter that ran for a moment.
    twin = 'job="gpu-exporter",node="n5",instance="twin",gpu="7",uuid="GPU-5",scheduler="slurm",job_id="5"'
    lines.append(f"gpu_allocation_idle_run_witnesses{{{twin}}} 1 {at}")
    # Job 6 holds a second GPU that does not answer. This GPU has every series except its activity.
    lines += job_series("6", end, lambda second: True)
    lines = [
        line.replace("} 1 ", "} 2 ") if "holder_units" in line and 'job_id="6"' in line else line for line in lines
    ]
    lost = 'job="gpu-exporter",node="n6",instance="n6",gpu="1",uuid="GPU-lost",scheduler="slurm",job_id="6"'
    lines += [
        f"gpu_allocation_info{{{lost}}} 1 {at}",
        f"gpu_allocation_start_timestamp_seconds{{{lost}}} {end - HISTORY_S - 20_000} {at}",
        f"gpu_allocation_holder_units{{{lost}}} 2 {at}",
        f"gpu_allocation_held_seconds_total{{{lost}}} 30000 {at}",
    ]
    # The work of three jobs on their hosts.
    for name, job, value in (
        ("activity_ratio", "7", 0.5),
        ("activity_ratio", "1", 0.0625),
        ("cpus", "1", 16),
        ("activity_ratio", "2", 0.1),
        ("io_bytes_per_second", "6", 3e7),
    ):
        place = f'job="gpu-exporter",node="n{job}",instance="n{job}",gpu="0",uuid="GPU-{job}",scheduler="slurm"'
        lines.append(
            f'gpu_allocation_host_{name}{{{place},job_id="{job}"}} {value} {at - 600}'
        )  # then the exporter restarts
    # Jobs 14 and 15 worked on their hosts for ten minutes, until 45 and until 15 minutes ago.
    for job, ended in (("14", 2700), ("15", 900)):
        lines += job_series(job, end, lambda second: True)
        place = f'job="gpu-exporter",node="n{job}",instance="n{job}",gpu="0",uuid="GPU-{job}",scheduler="slurm"'
        for second in range(0, HISTORY_S + 1, SCRAPE_S):
            ratio = 0.4 if ended <= HISTORY_S - second < ended + 600 else 0.1
            moment = end - HISTORY_S + second
            lines.append(f'gpu_allocation_host_activity_ratio{{{place},job_id="{job}"}} {ratio} {moment}')
    # The containers of jobs 16 and 17 restarted ten minutes ago. They last worked 150 and 90 minutes ago.
    for job, quiet in (("16", 9000), ("17", 5400)):
        place = f'job="gpu-exporter",node="n{job}",instance="n{job}",gpu="0",uuid="GPU-{job}",scheduler="slurm"'
        lines += [line.replace("} 8000 ", "} 600 ") for line in job_series(job, end, lambda second: True)]
        lines.append(f'gpu_allocation_last_active_timestamp_seconds{{{place},job_id="{job}"}} {end - quiet} {at}')
    # An hour in which witnesses made GPU-1 and an instance of GPU-2 busy.
    for second in range(0, 3601, SCRAPE_S):
        place = 'job="gpu-exporter",node="n1",instance="n1",gpu="0"'
        for name, labels, rate in (
            ("gpu_other", 'uuid="GPU-1",witness="pcie"', 0.5),
            ("gpu_other", 'uuid="GPU-1",witness="power"', 0.0),
            ("gpu_other", 'uuid="GPU-1",witness="<script>"', 1.0),
            ("gpu_other", 'uuid="GPU-2",witness="pcie"', 1.0),
            ("gpu_mig_other", 'uuid="GPU-1",mig="1/0",mig_uuid="MIG-1",witness="gpm_dram"', 0.25),
        ):
            value = 100 + rate * second
            lines.append(f"{name}_activity_seconds_total{{{place},{labels}}} {value} {end - 3600 + second}")
        if second >= 1800:  # the series began in this hour, with its full count
            born = f'{place},uuid="GPU-1",witness="encoder"'
            lines.append(f"gpu_other_activity_seconds_total{{{born}}} 10 {end - 3600 + second}")
    for uuid in ("GPU-h1", "GPU-h2"):  # of jobs that Slurm hides: no id
        hidden = f'job="gpu-exporter",node="nh",instance="nh",gpu="0",uuid="{uuid}",scheduler="slurm"'
        lines += [
            f'gpu_allocation_info{{{hidden},slurm_cluster="lab",identity="hidden"}} 1 {at}',
            f"gpu_allocation_idle_run_seconds{{{hidden}}} 8000 {at}",
        ]
    # Two targets for the exporter of one GPU, and a GPU that has no name.
    lines += [
        f'gpu_info{{job="gpu-exporter",instance="{place}",uuid="GPU-1",name="NVIDIA A100"}} 1 {at}'
        for place in ("n1", "t")
    ]
    # Storage that was down for ten minutes, until 40 minutes ago.
    lines += [
        f'storage_up{{server="{server}"}} {0 if end - 3000 <= at < end - 2400 else 1} {at}'
        for server in ("a", "b")
        for at in range(end - HISTORY_S, end + 1, SCRAPE_S)
    ]
    renamed = 'job="renamed",namespace="gpu-exporter",pod="agent-1",exported_namespace="ml",exported_pod="train"'
    lines += [f'gpu_allocation_idle_run_seconds{{{renamed},uuid="GPU-9",scheduler="kubernetes"}} 8000 {at}']
    # As with enforcedNamespaceLabel: every series has the same namespace, and no label was renamed.
    enforced = 'job="enforced",namespace="monitoring",node="n1",instance="n1",gpu="0",uuid="GPU-8"'
    lines += [f"gpu_up{{{enforced}}} 1 {at}", f'gpu_exporter_build_info{{job="enforced"}} 1 {at}']
    lines += [f'gpu_allocation_idle_run_seconds{{{enforced},pod="notebook-0",scheduler="kubernetes"}} 8000 {at}']
    lines += silent(end)
    lines += servers(end)
    lines += [*days_before(HOUR), f'gpu_exporter_build_info{{job="usual"}} 1 {at}']
    write_history(directory, lines)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the history."""
    require("prometheus", "promtool")
    directory = tmp_path_factory.mktemp("prometheus")
    end = int(time.time()) // 15 * 15
    write_series(directory, end)
    with Processes(directory) as processes:
        yield Prometheus(processes, directory, {})


def source(
    server: Prometheus, matcher: str = 'job="gpu-exporter"', policy: Policy = POLICY, **options: Any
) -> PromQLSource:
    about = PromQLOptions(parse_address(server.url), policy.candidate_after, policy.underused_after, matcher)
    parts = {name: options.pop(name) for name in ("fetch", "peaks", "pauses") if name in options}
    return PromQLSource(about._replace(**options), SYSTEM_CLOCK, **parts)


@pytest.fixture(scope="module")
def holders(prometheus: Prometheus) -> dict[str, HolderEvidence]:
    evidence = source(prometheus).read_evidence()
    return {holder.name.name: holder for holder in evidence.holders}


@pytest.fixture(scope="module")
def decisions(prometheus: Prometheus) -> dict[str, Decision]:
    evidence = source(prometheus).read_evidence()
    return {decision.name.name: decision for decision in decide(evidence, POLICY)}


@pytest.mark.parametrize(
    ("job", "stage", "low", "high"),
    [
        ("1", "underused", 0.999, 1.0),
        ("2", "unknown", 0.55, 0.62),  # repeatedly present for 70 s and absent for 50 s
        ("3", "unknown", 0.05, 0.15),  # absent for hours: Prometheus has ten minutes of it
        ("4", "unknown", 0.05, 0.15),
        ("7", "underused", 0.999, 1.0),  # a second target began ten minutes ago and observed all of them
        ("8", "unknown", 0.69, 0.71),  # a target that has ended observed less of its own hour
    ],
)
def test_coverage_is_the_share_of_the_time_held_that_was_observed(
    job: str, stage: str, low: float, high: float, holders: dict[str, HolderEvidence], decisions: dict[str, Decision]
) -> None:
    (unit,) = holders[job].units
    assert unit.coverage is not None
    assert low <= unit.coverage <= high
    assert decisions[job].stage == stage


def test_the_smaller_of_two_witness_values_counts(decisions: dict[str, Decision]) -> None:
    assert decisions["5"].stage == "candidate"
    assert decisions["5"].reason.endswith(
        "but only one witness shows it for a part of this time, so it stays a candidate"
    )


def test_a_gpu_that_does_not_answer_makes_its_job_unknown(decisions: dict[str, Decision]) -> None:
    assert (decisions["6"].stage, decisions["6"].active) == ("unknown", False)
    assert "the idle time of n6 gpu 1 is unknown" in decisions["6"].reason


def test_jobs_that_slurm_hides_are_not_judged_but_their_gpus_are_counted(prometheus: Prometheus) -> None:
    evidence = source(prometheus).read_evidence()
    assert evidence.hidden == 2
    assert all(holder.name.name for holder in evidence.holders)


def test_holders_of_exporters_that_stopped_are_unseen_unless_another_exporter_shows_their_gpus(
    prometheus: Prometheus,
) -> None:
    evidence = source(prometheus, 'job="silent"').read_evidence()
    starts = {each.name.name: int(each.incarnation) for each in evidence.unseen}
    assert sorted((each.exporter, str(each.name)) for each in evidence.unseen) == [("n31", "job 31"), ("n33", "job 33")]
    assert starts["31"] == starts["33"], "the start of job 33 before it was requeued"
    assert evidence.problems == ()


def test_explain_finds_an_array_task_that_is_not_suspected(prometheus: Prometheus) -> None:
    asked = source(prometheus, candidate_after_s=1e6, window_s=86_400.0)
    assert asked.read_evidence().holders == ()
    (found,) = asked.read_evidence([HolderName("slurm", "", "10_1")]).holders
    assert (found.name.name, found.users_id) == ("13", "10_1")
    assert found.units[0].idle_run_s == 8000.0


def test_witnesses_come_from_the_holders_own_gpus_in_the_last_hour(prometheus: Prometheus) -> None:
    found = source(prometheus).read_other_activity({"GPU-1"})
    assert {unit: sorted(seen) for unit, seen in found.items()} == {
        ("GPU-1", ""): ["encoder", "pcie"],
        ("GPU-1", "1/0"): ["gpm_dram"],
    }
    assert found["GPU-1", ""]["encoder"] == 10.0
    assert found["GPU-1", ""]["pcie"] == pytest.approx(1800, rel=0.03)
    assert found["GPU-1", "1/0"]["gpm_dram"] == pytest.approx(900, rel=0.03)


def test_renamed_labels_are_refused_with_the_remedy(prometheus: Prometheus) -> None:
    with pytest.raises(AnswerError, match="have exported_namespace and exported_pod, .* Set honorLabels: true"):
        source(prometheus, 'job="renamed"').read_evidence()


def test_an_enforced_namespace_is_refused_with_the_remedy(prometheus: Prometheus) -> None:
    with pytest.raises(AnswerError, match="makes no decisions. Drop the label of the targets"):
        source(prometheus, 'job="enforced"').read_evidence()


def test_policies_get_the_model_of_each_gpu(prometheus: Prometheus) -> None:
    asking = source(prometheus, asks_models=True)
    found = {each.name.name: {unit.model for unit in each.units} for each in asking.read_evidence().holders}
    assert (found["1"], found["5"]) == ({"NVIDIA A100"}, {""})


def test_host_work_is_evidence_only_for_the_holders_that_do_it(prometheus: Prometheus) -> None:
    asked = source(prometheus, host=HostLimits(POLICY.host_busy_ratio, POLICY.host_busy_io)).read_evidence()
    units = {each.name.name: each.units[0] for each in asked.holders}
    assert {name: unit.host_cpu_ratio for name, unit in units.items() if unit.host_cpu_ratio} == {"7": 0.5}
    assert {name: unit.host_io_bytes_per_s for name, unit in units.items() if unit.host_io_bytes_per_s} == {"6": 3e7}
    (decision,) = [each for each in decide(asked, POLICY) if each.name.name == "7"]
    assert decision.stage == "candidate"
    assert "but the holder uses 50% of its CPUs" in decision.reason
    assert {name: (unit.host_cores, unit.host_cpus) for name, unit in units.items() if unit.host_cores} == {
        "1": (1, 16)
    }


def test_past_work_on_the_host_counts_for_half_an_hour(prometheus: Prometheus) -> None:
    limits = HostLimits(POLICY.host_busy_ratio, POLICY.host_busy_io, 4 * 3600.0)
    asked = source(prometheus, host=limits).read_evidence()
    ages = {each.name.name: each.units[0].host_work_age_s for each in asked.holders}
    assert {job: round((age or 0.0) / 60) for job, age in ages.items() if job in ("1", "14", "15")} == {
        "1": 0,
        "14": pytest.approx(45, abs=5),
        "15": pytest.approx(15, abs=5),
    }
    assert ages["1"] is None
    used = {each.name.name: each.units[0].cores_age_s for each in asked.holders}
    assert used["1"] == pytest.approx(300, abs=300) and used["14"] is None
    found = {each.name.name: each for each in decide(asked, POLICY)}
    assert (found["14"].stage, found["15"].stage) == ("underused", "candidate")
    assert re.search(r"but the holder worked outside its GPUs (1|2)\d min ago, so it stays", found["15"].reason)


def test_a_holder_whose_idle_runs_are_interrupted_is_evidence_and_counted(
    holders: dict[str, HolderEvidence], decisions: dict[str, Decision]
) -> None:
    assert holders["16"].units[0].quiet_s == pytest.approx(9000, abs=300)
    assert (decisions["16"].stage, why_spared(decisions["16"])) == ("active", "interrupted")
    assert "17" not in holders


def paused(server: Prometheus, pause_when: str, policy: Policy = POLICY) -> tuple[Decision, Evidence]:
    """The decision on job 1 and its evidence, of a reconciler that has just started."""
    policy = policy._replace(pause_when=pause_when)
    pauses = Pauses(policy.pause_when, Rulebook(policy).longest_s)
    asked = source(server, policy=policy, pauses=pauses).read_evidence()
    (decision,) = [each for each in decide(asked, policy) if each.name == HolderName("slurm", "", "1")]
    return decision, asked


def test_idle_time_before_the_end_of_a_pause_does_not_count(prometheus: Prometheus) -> None:
    """The storage came back 40 minutes ago: enough for windows of 30 minutes, too short for a window of 60."""
    decision, evidence = paused(prometheus, "storage_up == 0")
    assert (decision.stage, evidence.paused) == ("unknown", "")
    assert re.fullmatch(
        r"idle for 2\.\d h|idle for 1\d\d min, but a pause of the reconciler ended (39|4[0-2]) min ago", decision.reason
    )
    short = POLICY._replace(candidate_after=1800.0, underused_after=3000.0)
    decision, _ = paused(prometheus, "storage_up == 0", short)
    assert decision.stage == "candidate", decision.reason
    decision, _ = paused(prometheus, "storage_up == 0", short._replace(underused_after=2000.0))
    assert decision.stage == "underused", decision.reason
    decision, evidence = paused(prometheus, "storage_up == 7")
    assert (decision.stage, evidence.paused) == ("underused", "")


def test_an_active_pause_is_reported_and_an_unreadable_pause_leaves_no_evidence(
    prometheus: Prometheus,
) -> None:
    decision, evidence = paused(prometheus, "storage_up == 1")
    assert (decision.stage, evidence.paused) == ("unknown", "policy.pause_when has 2 series")
    with pytest.raises(AnswerError, match=r"^policy\.pause_when: .*parse error"):
        paused(prometheus, "storage_up ==")


def test_explain_answers_for_a_gpu_and_a_time_in_the_past(prometheus: Prometheus) -> None:
    command = ("explain", "GPU-1", f"--source.prometheus={prometheus.url}", "--no-slurm", "--no-kubernetes")
    done = run_exporter(*command)
    assert done.returncode == 0 and done.stdout.startswith("job 1: stage underused: "), done.stdout + done.stderr
    assert "; the holder uses 1.0 of its 16 CPU cores" in done.stdout.splitlines()[0]
    done = run_exporter(*command, "--at=1m")
    assert done.returncode == 0 and done.stdout.startswith("job 1: stage underused: "), done.stdout + done.stderr
    assert "the objects around the holder at that time are unknown" in done.stderr
    done = run_exporter(*command, "--at=30m")  # the history has exporters only in its last two minutes
    assert (done.returncode, "no gpu-exporter series match" in done.stderr) == (3, True)
    done = run_exporter("explain", "job/7", *command[2:])
    assert (
        "min, but the holder uses 50% of its CPUs, so it stays a candidate until it has been idle for 6.0 h"
        in done.stdout
    )
    done = run_exporter("explain", "job/1", *command[2:], "--at=2026-01-01T00:00:00")
    assert (done.returncode, "has no zone: write 2026-01-01T00:00:00Z for UTC" in done.stderr) == (2, True)
    done = run_exporter("explain", "job/1", "--source.exporter=n1:9836", "--at=1h")
    assert (done.returncode, "--at needs --source.prometheus" in done.stderr) == (2, True)


def test_the_usual_number_of_idle_gpus_comes_from_earlier_days(prometheus: Prometheus) -> None:
    evidence = source(prometheus, 'job="usual"').read_evidence()
    assert evidence.usual_at(HOUR + 1200.0) == 10.0, "the median of 12, none, 100, 9, 11 and a quarter of 10"
    assert evidence.usual_at(HOUR + 3600.0) == 0.0
    assert evidence.usual_at(HOUR + 20 * 86_400.0) is None


def test_pods_with_a_low_load_in_their_busiest_hour_are_found(prometheus: Prometheus) -> None:
    asked: list[str] = []

    def count(address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        asked.append(form["query"])
        return fetch_text(address, form, most_bytes, within_s)

    peaks = Peaks(POLICY.sharing_below, POLICY.sharing_window, SYSTEM_CLOCK)
    api = source(prometheus, 'job="serving"', fetch=count, peaks=peaks)
    assert api.read_evidence().sharing == {}
    assert "bottomk" in "".join(asked[-2:]), "a hint is asked for last, and is there in the next cycle"
    evidence = api.read_evidence()
    assert {name.name for name in evidence.sharing} == {"quiet", "nearly", "two", "older-peak"}
    assert {holder.name for holder in evidence.holders} == set(evidence.sharing), "and they are evidence like others"
    quiet = evidence.sharing[HolderName("kubernetes", "ml", "quiet")]
    assert quiet == "in its busiest hour of the last 7d it used 11% of its GPUs, below 20%"
    assert evidence.sharing[HolderName("kubernetes", "ml", "two")].count("used 2% of its GPUs") == 1
    before = len([query for query in asked if "bottomk" in query])
    assert api.read_evidence().sharing == evidence.sharing
    assert len([query for query in asked if "bottomk" in query]) == before == 1, "once an hour"
