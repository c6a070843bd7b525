"""Slurm's lists of generic resources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.slurm.gres import Gres, add_devices, parse_gres


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Gres()),
        ("(null)", Gres()),
        ("gpu:h100:2(IDX:0-1)", Gres((0, 1))),
        ("gpu:2(IDX:0,2-3)", Gres((0, 2, 3))),
        ("gpu:h100:0(IDX:N/A)", Gres()),
        ("gpu:a100:1(IDX:0),gpu:h100:1(IDX:2)", Gres((0, 2))),
        ("gpu:1g.10gb:1(IDX:4)", Gres((4,))),
        ("gpu:2", Gres((), 2)),  # GresUsed of GPUs without a type names no position (seen on both releases)
        ("gpu:a100:4(S:0-1)", Gres((), 4)),
        ("gpu:a100:1(IDX:3),shard:4(IDX:1)", Gres((3,), 0, ((1, "shard"),))),
        ("shard:1(0/0,0/0,1/4,0/4)", Gres((), 0, ((2, "shard"),))),
        ("shard:h100:5(-/4,4/4,1/4,0/4),mps:50(IDX:3)", Gres((), 0, ((1, "shard"), (2, "shard"), (3, "mps")))),
        ("shard:2(0/4,0/4)", Gres((), 0, (), "shard:2(0/4,0/4)")),
        ("shard:0(IDX:N/A),mps:0,craynetwork:2", Gres()),
        ("gres:gpu:2(IDX:1-2)", Gres((1, 2))),
        ("gpu:4(IDX:0-3),nic:2(IDX:0,2),nic:(null):0(IDX:N/A)", Gres((0, 1, 2, 3))),
        ("craynetwork:2,gpu:h100:1(IDX:3)", Gres((3,))),
        ("gpu:h100:2,gpu:a100:3,gpu:v100:1(IDX:5)", Gres((5,), 5)),
        ("gpu", Gres((), 1)),  # a missing count means one, as in Slurm
        ("gpu:h100,gpu:a100(IDX:1)", Gres((1,), 1)),
        ("shard", Gres((), 0, (), "shard")),
    ],
)
def test_gres_lists_are_read(text: str, expected: Gres) -> None:
    assert parse_gres(text) == expected


@pytest.mark.parametrize(
    "text",
    ["gpu:2(IDX:0-", "gpu:2(IDX:a)", "gpu(", "a b", "gpu:1(IDX:0),gpu:1(IDX:0)", ",", "gpu:1)", "gpu:1(IDX:0:1)"],
)
def test_a_gres_list_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_gres(text)


@given(st.text(alphabet="gpushard:0123456789(),-IDXSN/A. ", max_size=40))
def test_any_gres_text_gives_numbers_or_a_value_error(text: str) -> None:
    try:
        gres = parse_gres(text)
    except ValueError:
        return
    assert len(set(gres.indexes)) == len(gres.indexes)
    assert gres.unnamed >= 0


@pytest.mark.parametrize(
    ("texts", "devices"),
    [
        ([], 0),
        (["gpu:h100:2(IDX:0-1)", "gpu:h100:3(IDX:0-1,3)"], 5),
        (["gpu:2"], 2),
        (["shard:6(2/4,4/4)"], 2),
        (["shard:2(IDX:1)", "shard:1(1/4,0/4)"], 2),
        (["gpu:1(IDX:3),shard:1(1/4,0/4)"], 2),
        (["gpu:1(IDX:0)", "shard:2"], None),
    ],
)
def test_the_number_of_a_jobs_gpus_is_its_number_of_devices(texts: list[str], devices: int | None) -> None:
    assert add_devices(map(parse_gres, texts)) == devices
