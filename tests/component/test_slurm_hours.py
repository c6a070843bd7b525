"""Short jobs on an undisturbed node with the shipped prolog and epilog: the hours of each account are Slurm's own."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.component.test_slurm import FLAGS, PROLOG, SCENARIO, plug
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.slurm import GPUS, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
LAYOUT = Layout(
    files={name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in PROLOG.items()},
    settings="PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n",
)


def hours_of_slurm(slurm: Slurm, jobs: list[str]) -> dict[str, float]:
    """GPU-seconds by account, from start to end of every task: what sacct would show."""
    found: dict[str, float] = defaultdict(float)
    for job in jobs:
        text = slurm.run("scontrol", "-o", "show", "job", job, environment={"SLURM_TIME_FORMAT": "%s"})
        for line in text.splitlines():
            start, end = (int(re.search(rf"\b{name}=(\d+)", line)[1]) for name in ("StartTime", "EndTime"))  # type: ignore[index]
            account = re.search(r"\bAccount=(\S+)", line)
            assert account is not None and "JobState=COMPLETED" in line, line
            found[account[1]] += end - start
    return found


def hours_of_ours(page: str, counter: str) -> dict[str, float]:
    pattern = rf'^gpu_tenant_{counter}_gpu_seconds_total{{.*?account="(\w*)".*?}} (\S+)$'
    return {account: float(value) for account, value in re.findall(pattern, page, re.MULTILINE)}


@pytest.mark.parametrize(("release", "seconds", "tasks"), [("22.05", 3, 24), ("24.11", 3, 24), ("26.05", 10, 12)])
def test_arrays_of_short_tasks_have_the_hours_that_slurm_counts(
    release: str,
    seconds: int,
    tasks: int,
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    tmp_path: Path,
) -> None:
    with start_slurm(processes, chroot_of(release), LAYOUT) as slurm:
        environment = {
            **nvml_environment,
            "SLURM_CONF": slurm.environment["SLURM_CONF"],
            "PATH": slurm.environment["PATH"],
        }
        (slurm.root / "jobs").mkdir()
        plug(nvml_table, range(GPUS))
        feeder = ScenarioFeeder(SCENARIO, nvml_table)
        feeder.start()
        flags = (*FLAGS, f"--attribution.slurm.job-files={slurm.root / 'jobs'}", f"--state.directory={tmp_path}")
        _, url = processes.start_exporter(*flags, environment=environment)
        wait_for(
            lambda: 'gpu_exporter_attribution_complete{source="slurm"} 1' in (fetch(f"{url}/metrics") or ""), "Slurm"
        )
        script = slurm.root / "short.sh"
        script.write_text(f"#!/bin/sh\nsleep {seconds}\n", encoding="utf-8")
        script.chmod(0o755)
        jobs = [
            slurm.submit_script(script, "-n1", "--gres=gpu:1", f"--account={account}", f"--array=1-{tasks // 2}")
            for account in ("chem", "phys")
        ]
        wait_for(lambda: not slurm.run("squeue", "-h").strip(), "the end of all tasks", 240, 1.0)
        truth = hours_of_slurm(slurm, jobs)
        assert truth.keys() == {"chem", "phys"}
        seen: list[tuple[float, str]] = []

        def page() -> str | None:
            """What it says once two polls have added nothing: the last ends are told with the next poll."""
            text = fetch(f"{url}/metrics") or ""
            hours = str((hours_of_ours(text, "held"), hours_of_ours(text, "known")))
            if not seen or seen[-1][1] != hours:
                seen.append((time.monotonic(), hours))
            return text if time.monotonic() - seen[-1][0] > 12.0 else None

        text = wait_for(page, "their hours", 60, 0.5)
        feeder.stop()
        assert 'gpu_exporter_jobs_missed_total{source="slurm"} 0' in text
        held, known = hours_of_ours(text, "held"), hours_of_ours(text, "known")
        # Prolog and epilog run some milliseconds after slurmctld's own dates: now and then in another second, and since
        # tasks begin together, for several of them.
        total = sum(truth.values())
        assert sum(held.values()) == pytest.approx(total, abs=max(0.01 * total, 0.15 * tasks)), (held, truth)
        for account in truth:
            assert known[account] == pytest.approx(held[account], rel=0.01), account
