"""The size that is enough in place of a whole GPU."""

from __future__ import annotations

import pytest

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reports.digest.oversized import find, would_do

GB = 1e9


@pytest.mark.parametrize(
    ("model", "mean", "peak", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB", 0.1, 4 * GB, "1g.5gb"),
        ("NVIDIA A100-SXM4-40GB", 0.1, 6 * GB, "2g.10gb"),
        ("NVIDIA A100-SXM4-40GB", 0.1, 10.3 * GB, "a smaller GPU"),
        ("NVIDIA A100-SXM4-80GB", 0.1, 9 * GB, "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", 0.14, 10 * GB, "1g.10gb"),
        ("NVIDIA H100 80GB HBM3", 0.15, 1 * GB, "2g.20gb"),
        ("NVIDIA H100 NVL", 0.1, 10 * GB, "1g.12gb"),
        ("NVIDIA H200", 0.2, 10 * GB, "2g.35gb"),
        ("NVIDIA A30", 0.2, 5 * GB, "1g.6gb"),
        ("NVIDIA A30", 0.2, 6.4 * GB, "2g.12gb"),
        ("NVIDIA A300", 0.1, 1 * GB, "a smaller GPU"),
        ("NVIDIA L40S", 0.1, 1 * GB, "a smaller GPU"),
    ],
)
def test_the_smallest_profile_with_enough_memory_and_slices_is_chosen(
    model: str, mean: float, peak: float, profile: str
) -> None:
    assert would_do(model, mean, peak) == profile


def test_only_holders_with_all_values_and_one_model_are_listed() -> None:
    def rows(*values: tuple[str, float], **more: str) -> list[VectorRow]:
        return [VectorRow({"scheduler": "slurm", "job_id": job, **more}, value) for job, value in values]

    answers = {
        "over_hours": rows(("1", 30.0), ("2", 90.0), ("3", 40.0), ("4", 50.0), ("5", 60.0), user="ada"),
        "over_mean": rows(("1", 0.1), ("2", 0.1), ("4", 0.1), ("5", 0.1)),
        "over_peak": rows(("1", 1e9), ("2", 1e9), ("3", 1e9), ("5", 1e9)),
        "over_model": [
            *rows(("1", 1.0), ("2", 1.0), ("5", 1.0), name="NVIDIA H200"),
            *rows(("5", 1.0), name="NVIDIA L4"),
        ],
    }
    found = find(answers, lambda labels: labels["user"])
    assert [(each.title, each.owner, each.hours) for each in found] == [("job 2", "ada", 90.0), ("job 1", "ada", 30.0)]
