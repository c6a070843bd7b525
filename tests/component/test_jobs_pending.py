"""The number of GPUs that pending jobs of a real Slurm wait for, on the metrics page of a reconciler in a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.pages import serve_page
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.testbed.slurm import GPUS, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm


@pytest.fixture(params=["22.05", "24.11", "26.05"])
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm]:
    chroot = chroot_of(request.param)
    with Processes(tmp_path) as processes, start_slurm(processes, chroot) as slurm:
        yield slurm
        slurm.cancel_all()


def test_only_jobs_that_wait_for_gpus_count_as_demand(slurm: Slurm, processes: Processes) -> None:
    slurm.submit(f"--gres=gpu:h100:{GPUS}")
    for flags in (
        ["--gres=gpu:2"],
        ["--gpus=1"],
        ["--gpus-per-task=1", "-n2"],
        ["--gres=gpu:1", "--array=1-3"],
    ):
        slurm.submit(*flags, runs=False)
    waits = slurm.submit("--gres=gpu:1", "--hold", runs=False)
    slurm.submit("--gres=gpu:1", f"--dependency=afterok:{waits}", runs=False)
    slurm.submit("--gres=gpu:1", "--begin=now+1hour", runs=False)
    with serve_page(str) as page:
        port = free_port()
        flags = ("reconcile", f"--source.exporter={page}", "--interval=1s", f"--web.listen-address=127.0.0.1:{port}")
        processes.start([*GPU_EXPORTER, *flags], slurm.environment)

        def demand() -> list[str]:
            text = fetch(f"http://127.0.0.1:{port}/metrics") or ""
            return [line for line in text.splitlines() if line.startswith("gpu_demand_pending_gpus{")]

        wait_for(lambda: demand() == ['gpu_demand_pending_gpus{pool="gpu"} 8.0'] or None, "2 + 1 + 2 + 3 GPUs")
        slurm.cancel_all()
        wait_for(lambda: demand() == [] or None, "nothing to be waited for")
