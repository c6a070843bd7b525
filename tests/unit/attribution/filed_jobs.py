"""What the tests of this subject share: jobs that are known from the prolog's files alone: slurmctld is not asked, and nothing is guessed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from hypothesis import strategies as st
from tests.unit.attribution.slurm_quiet_node import Filing

import gpu_exporter
from gpu_exporter.agent.attribution.slurm.filed import FILL_S
from gpu_exporter.agent.attribution.slurm.on_node.job_files import FiledRun, JobFile
from gpu_exporter.agent.attribution.source import Answer

EPILOG = Path(gpu_exporter.__file__).parent / "contrib" / "slurm" / "epilog.sh"
AWAY = "Unable to contact slurm controller"
START = 4_000_000_500


def begin(filing: Filing, job: str, gpus: str, *, start: int = START, restarts: int = 0, **words: str) -> None:
    """The prolog of a job has run, and the job's step exists."""
    said = {
        "gpus": gpus, "visible": gpus, "user": "ada", "uid": "1000", "account": "chem", "partition": "gpu",
        "cluster": "lab", "restarts": str(restarts), "start": str(start), "nodes": "1", **words,
    }  # fmt: skip
    filing.file(job, "".join(f"{name}={value}\n" for name, value in said.items() if value))
    assert filing.steps is not None
    filing.steps[job] = {1000 + int(job)}


def end(filing: Filing, job: str) -> None:
    """The epilog has run."""
    (filing.files / job).unlink()
    assert filing.steps is not None
    filing.steps.pop(job, None)


def held(answer: Answer) -> dict[str, list[str]]:
    jobs: dict[str, list[str]] = {}
    for grant in answer.grants:
        assert (grant.kind, grant.running) == ("minor", True)
        jobs.setdefault(grant.holder.job_id, []).append(grant.device)
    return jobs


def asked(filing: Filing) -> list[str]:
    return [text for text in filing.asked if "listpids" not in text]


def poll(filing: Filing) -> Answer:
    filing.clock.advance(5.0)
    return filing.source.poll()


def fill(filing: Filing) -> None:
    """Advance until slurmctld has reported what no prolog is told."""
    for _ in range(int(FILL_S / 5) + 3):
        poll(filing)


def end_and_say(filing: Filing, job: str, *, is_now: bool = True) -> None:
    """The epilog of gpu-exporter has run. `is_now`: also by the exporter's clock."""
    environment = {"PATH": "/usr/bin:/bin", "GPU_EXPORTER_JOB_FILES": str(filing.files), "SLURM_JOB_ID": job}
    path = filing.files / job
    path.write_text(f"job={job}\n{path.read_text()}")
    subprocess.run(["sh", str(EPILOG)], env=environment, check=True, timeout=10)
    assert not path.exists()
    assert filing.steps is not None
    filing.steps.pop(job, None)
    if is_now:
        filing.clock.advance(max(0.0, time.time() - filing.clock.wall()))


REFUSED = "Unable to connect to slurmstepd: Connection refused"


def ask_nothing(filing: Filing) -> None:
    """The limit of early questions is reached, or a collector's round is not over."""
    filing.source._pace.is_due = lambda now, changed: False  # type: ignore[method-assign]


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "requeue", "away", "back", "wait"]), st.integers(0, 3), st.booleans()),
    max_size=30,
)
FILED = JobFile((0,), (), 1000.0, FiledRun("ada", "1000", "", "", "lab", "0", 995.0, 1), 1001.0)
UNDATED = FiledRun("ada", "1000", "", "", "lab", "0", None, 1)
