"""Shares of a board: the sum of all shares never exceeds the board, for every division and sharing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.resolve import resolve
from gpu_exporter.agent.devices.nvml.device import _divide
from gpu_exporter.agent.devices.nvml.library import Handle
from gpu_exporter.agent.devices.products import PRODUCTS
from gpu_exporter.agent.devices.protocol import InstanceIdentity
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, InstanceReading
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.shares import divide_gpu_instance

# Compute slices of the GPU instance profiles, by product (MIG user guide, "Supported MIG Profiles").
PROFILES = {
    "NVIDIA A30": (4, {"1g.6gb": 1, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 2, "4g.24gb": 4}),
    **{
        product: (7, {f"{slices}g.{gib}gb{extra}": slices for slices, gib, extra in profiles})
        for product, profiles in {
            "NVIDIA A100-SXM4-40GB": [(1, 5, ""), (1, 5, "+me"), (1, 10, ""), (2, 10, ""), (3, 20, ""), (4, 20, ""), (7, 40, "")],
            "NVIDIA A100-SXM4-80GB": [(1, 10, ""), (1, 10, "+me"), (1, 20, ""), (2, 20, ""), (3, 40, ""), (4, 40, ""), (7, 80, "")],
            "NVIDIA H100 80GB HBM3": [(1, 10, ""), (1, 10, "+me"), (1, 20, ""), (2, 20, ""), (3, 40, ""), (4, 40, ""), (7, 80, "")],
            "NVIDIA H200": [(1, 18, ""), (1, 18, "+me"), (1, 35, ""), (2, 35, ""), (3, 71, ""), (4, 71, ""), (7, 141, "")],
            "NVIDIA B200": [(1, 23, ""), (1, 23, "+me"), (1, 45, ""), (2, 45, ""), (3, 90, ""), (4, 90, ""), (7, 180, "")],
            "NVIDIA GH200 480GB": [(1, 12, ""), (1, 12, "+me"), (1, 24, ""), (2, 24, ""), (3, 48, ""), (4, 48, ""), (7, 96, "")],
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "slices", "memory_slices"),
    [
        ("NVIDIA A30", 4, 4),
        ("NVIDIA A30-24C", 4, 4),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, 4),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 4, 4),
        ("NVIDIA RTX PRO 5000 Blackwell", 2, 2),
        ("NVIDIA RTX PRO 4500 Blackwell Server Edition", 2, 2),
        ("NVIDIA RTX A3000 Laptop GPU", 7, 8),
        ("NVIDIA RTX 6000 Ada Generation", 7, 8),
        ("NVIDIA H100 80GB HBM3", 7, 8),
        ("NVIDIA GB300", 7, 8),
    ],
)
def test_the_slices_of_a_board_follow_from_the_full_product_name(name: str, slices: int, memory_slices: int) -> None:
    identity = DeviceIdentity(0, "GPU-0", name, "580", "00000000:10:00.0", 0)
    assert (identity.mig_slices, identity.mig_memory_slices) == (slices, memory_slices)


@st.composite
def boards(draw: st.DrawFn) -> tuple[str, list[tuple[int, list[int]]], list[int]]:
    """A product, its GPU instances as (slices, reported slices of each compute instance), and holders per instance."""
    product = draw(st.sampled_from(sorted(PROFILES)))
    left, profiles = PROFILES[product]
    layout: list[tuple[int, list[int]]] = []
    while fitting := sorted({slices for slices in profiles.values() if slices <= left}):
        slices = draw(st.sampled_from([0, *fitting]))
        if not slices:
            break
        left -= slices
        parts: list[int] = []
        while sum(parts) < slices and (not parts or draw(st.booleans())):
            parts.append(draw(st.integers(1, slices - sum(parts))))
        unreported = draw(st.sampled_from(["none", "one", "all", "nonsense"]))
        if unreported == "one":
            parts[draw(st.integers(0, len(parts) - 1))] = 0
        elif unreported == "all":
            parts = [0] * len(parts)
        elif unreported == "nonsense":
            parts = [slices] * len(
                parts
            )  # as drivers that reported the GPU instance's slices for each compute instance
        layout.append((slices, parts))
    count = sum(len(parts) for _, parts in layout)
    return product, layout, draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))


def shares_of(product: str, layout: list[tuple[int, list[int]]], holders: list[int]) -> list[float]:
    found, compute = [], {}
    for number, (slices, parts) in enumerate(layout):
        compute[number] = parts
        for position in range(len(parts)):
            identity = InstanceIdentity(f"MIG-{number}-{position}", f"{number}/{position}", "", slices)
            found.append((Handle(""), identity))
    instances = tuple(
        InstanceReading(i.uuid, i.mig, i.profile, i.sm_slices, (), None) for _, i in _divide(found, compute)
    )
    snapshot = DeviceSnapshot(
        DeviceIdentity(0, "GPU-0", product, "580", "0000:00", 0, "enabled"), 0.0, 0.0, True, instances=instances
    )
    grants = [
        Grant(
            "uuid", f"{instance.uuid}::{n}", Holder(HolderKey("kubernetes", f"{instance.uuid}/{n}"), source="kubelet")
        )
        for instance, count in zip(instances, holders, strict=True)
        for n in range(count)
    ]
    return [allocation.share_ratio for allocation, _ in resolve(grants, [snapshot]).allocations]


@given(boards())
def test_the_shares_of_a_board_never_exceed_the_board(
    board: tuple[str, list[tuple[int, list[int]]], list[int]],
) -> None:
    product, layout, holders = board
    shares = shares_of(product, layout, holders)
    assert len(shares) == sum(holders)
    assert all(share > 0.0 for share in shares)
    assert sum(shares) <= sum(slices for slices, _ in layout) / PROFILES[product][0] + 1e-9 <= 1 + 1e-9


@pytest.mark.parametrize("product", PROFILES)
def test_the_share_of_each_profile_is_its_slices_of_the_board(product: str) -> None:
    whole, profiles = PROFILES[product]
    for slices in profiles.values():
        assert shares_of(product, [(slices, [slices])], [1]) == pytest.approx([slices / whole])
    assert sum(shares_of(product, [(1, [1])] * whole, [1] * whole)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("slices", "compute", "divided"),
    [
        (3, [1, 1, 1], [1.0, 1.0, 1.0]),
        (3, [1, 2], [1.0, 2.0]),
        (3, [1], [1.0]),  # the rest of the GPU instance is not assigned to a holder
        (3, [0, 0, 0], [1.0, 1.0, 1.0]),
        (3, [1, 0], [1.5, 1.5]),
        (3, [3, 3, 3], [1.0, 1.0, 1.0]),
        (4, [4], [4.0]),
    ],
)
def test_compute_instances_divide_their_gpu_instance(slices: int, compute: list[int], divided: list[float]) -> None:
    assert divide_gpu_instance(slices, compute) == divided


def test_more_instances_than_a_product_can_have_share_the_whole_board() -> None:
    """A future product with eight slices, whose name the exporter does not know."""
    assert shares_of("NVIDIA X", [(1, [1])] * 8, [1] * 8) == pytest.approx([1 / 8] * 8)


@pytest.mark.parametrize("model", [name for name, product in PRODUCTS.items() if product.mig])
def test_a_simulated_board_is_as_busy_as_all_its_instances_together(model: str) -> None:
    slices = 4 if model == "A30" else 7
    mig = [{"profile": "1g.6gb", "gi": i, "load": {"kind": "constant", "value": 1}} for i in range(slices)]
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": model, "mig": mig}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    clock.advance(10.0)
    assert device.read_power() == pytest.approx(0.9 * scenario.gpus[0].product.power_limit)
    assert [i.identity.sm_slices for i in device.list_instances()] == [1] * slices


def test_a_compute_instance_has_the_slices_in_its_profile_name() -> None:
    mig = [{"profile": "1c.3g.40gb"}, {"profile": "2c.3g.40gb", "gi": 1, "ci": 1}]
    instances = parse_scenario({"gpus": [{"model": "H100", "mig": mig}]}).gpus[0].instances
    assert [(i.sm_slices, i.gpu_slices) for i in instances] == [(1, 3), (2, 3)]
