"""The size that is enough in place of a whole GPU."""

from __future__ import annotations

import pytest

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reports.usage.tenants.oversized import PROFILES, find, would_do

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
        ("NVIDIA GB200", 0.2, 5 * GB, "2g.47gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 0.2, 5 * GB, "1g.24gb"),
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


# Names as NVML reports them (NVIDIA's driver README, list of supported chips; GH200: nvidia-smi), with the smallest
# profile of each board, "" without MIG.
NAMES = {
    "NVIDIA A100-SXM4-40GB": "1g.5gb",
    "NVIDIA A100-PCIE-40GB": "1g.5gb",
    "NVIDIA A100-SXM4-80GB": "1g.10gb",
    "NVIDIA A100 80GB PCIe": "1g.10gb",
    "NVIDIA A800-SXM4-80GB": "1g.10gb",
    "NVIDIA H100 80GB HBM3": "1g.10gb",
    "NVIDIA H100 PCIe": "1g.10gb",
    "NVIDIA H100 NVL": "1g.12gb",
    "NVIDIA H20": "1g.12gb",
    "NVIDIA H200": "1g.18gb",
    "NVIDIA H200 NVL": "1g.18gb",
    "NVIDIA GH200 120GB": "1g.12gb",
    "NVIDIA GH200 480GB": "1g.12gb",
    "NVIDIA GH200 144G HBM3e": "1g.18gb",
    "NVIDIA B200": "1g.23gb",
    "NVIDIA GB200": "1g.23gb",
    "NVIDIA B300 SXM6 AC": "1g.34gb",
    "NVIDIA GB300": "1g.35gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "1g.24gb",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "1g.24gb",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "1g.24gb",
    "NVIDIA RTX PRO 5000 Blackwell": "1g.24gb",
    "NVIDIA RTX PRO 5000 72GB Blackwell": "",
    "NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU": "",
    "NVIDIA RTX PRO 4500 Blackwell": "1g.16gb",
    "NVIDIA RTX PRO 4500 Blackwell Server Edition": "1g.16gb",
    "NVIDIA RTX PRO 4000 Blackwell": "",
    "NVIDIA RTX 6000D": "",
    "NVIDIA GB10": "",
    "NVIDIA A30": "1g.6gb",
    "NVIDIA L40S": "",
    "NVIDIA GeForce RTX 5090": "",
    "Tesla V100-SXM2-32GB": "",
    "Tesla T4": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_a_product_has_the_profiles_of_one_product_at_most(name: str) -> None:
    matching = [profiles for pattern, *profiles in PROFILES if pattern.search(name)]
    assert [profiles[0][0] for profiles in matching] == ([NAMES[name]] if NAMES[name] else [])


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
    found = [(each.who.holder, each.who.user, each.who.model, each.use.held) for each in find(answers)]
    assert found == [("job 2", "ada", "NVIDIA H200", 90.0), ("job 1", "ada", "NVIDIA H200", 30.0)]
