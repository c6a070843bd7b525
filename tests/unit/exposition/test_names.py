"""Names of a holder: for people, and as labels."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.totals import HolderTotals
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AgentStatus, AllocationView, Verdict, View

JOB = Holder(HolderKey("slurm", "lab/3011/0/100"), job_id="3011", cluster="lab", source="slurm")
POD = Holder(HolderKey("kubernetes", "uid/main"), namespace="ml", pod="train-0", container="main")


@pytest.mark.parametrize(
    ("holder", "label"),
    [
        (JOB, "job 3011"),
        (JOB._replace(array_job_id="3010", array_task_id="1"), "job 3010_1"),
        (JOB._replace(array_job_id="3010", array_task_id="0"), "job 3010_0"),
        (JOB._replace(het_job_id="3011", het_job_offset="1"), "job 3011+1"),
        (JOB._replace(het_job_id="3011", het_job_offset="0"), "job 3011+0"),
        (JOB._replace(array_job_id="3010"), "job 3011"),
        (JOB._replace(het_job_id="3010"), "job 3011"),
        (POD, "ml/train-0/main"),
    ],
)
def test_a_holder_has_the_name_that_its_scheduler_accepts(holder: Holder, label: str) -> None:
    assert holder.label == label


def info_line(holder: Holder) -> str:
    """The info series of this holder on GPU-0."""
    totals = HolderTotals(0.0, False, 0.0, 0.0, 0.0, 0.0, 0.0, None, 0.0, 0.0, None)
    held = AllocationView(Allocation(UnitId("GPU-0"), holder), 0, "", totals, Verdict("unknown", ""))
    view = View(0.0, AgentStatus("TEST", "nvml", True, "", 1, 1, 1.0, None), (), (held,))
    lines = TextRenderer().render(list_series(view)).splitlines()
    return next(line for line in lines if line.startswith("gpu_allocation_info{"))


def test_the_slurm_cluster_has_its_own_label_because_prometheus_sets_cluster() -> None:
    line = info_line(JOB)
    assert 'slurm_cluster="lab"' in line
    assert ',cluster="' not in line


def test_array_tasks_and_het_components_have_both_numbers_and_other_jobs_have_neither() -> None:
    task = info_line(JOB._replace(array_job_id="3010", array_task_id="1"))
    assert 'array_job_id="3010",array_task_id="1"' in task
    component = info_line(JOB._replace(het_job_id="3011", het_job_offset="1"))
    assert 'het_job_id="3011",het_job_offset="1"' in component
    assert "array_" not in info_line(JOB) + component
    assert "het_" not in info_line(JOB) + task
