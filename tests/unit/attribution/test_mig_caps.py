"""Which MIG instance a capability file opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.slurm.gres.mig_caps import PLACE, find_instance, read_caps

MINORS = """config 1
monitor 2
gpu0/gi7/access 30
gpu0/gi7/ci0/access 31
gpu0/gi7/ci1/access 32
gpu0/gi8/access 39
gpu12/gi3/ci1/access 170
"""


def put(root: Path, text: str) -> Path:
    (root / PLACE).parent.mkdir(parents=True)
    (root / PLACE).write_text(text, "utf-8")
    return root


def test_the_drivers_list_of_possible_instances_is_read(tmp_path: Path) -> None:
    assert read_caps(put(tmp_path, MINORS)) == {30: "0/7", 31: "0/7/0", 32: "0/7/1", 39: "0/8", 170: "12/3/1"}


def test_a_list_with_bytes_that_are_not_text_is_read_as_far_as_possible(tmp_path: Path) -> None:
    put(tmp_path, "")
    (tmp_path / PLACE).write_bytes(b"\xff\xfe\ngpu0/gi7/access 30\n")
    assert read_caps(tmp_path) == {30: "0/7"}


def test_a_driver_without_the_list_has_no_capability_files(tmp_path: Path) -> None:
    assert read_caps(tmp_path) == {}


@pytest.mark.parametrize(
    ("caps", "instance"),
    [
        ((30, 31), "0/7/0"),
        ((31, 30), "0/7/0"),
        ((30,), "0/7"),
        ((30, 31, 5), "0/7/0"),  # one of the files opens something else
        ((30, 39), ""),  # two instances
        ((31, 32), ""),
        ((30, 31, 39), ""),
        ((5,), ""),
        ((), ""),
    ],
)
def test_files_that_open_one_instance_together_name_it(tmp_path: Path, caps: Sequence[int], instance: str) -> None:
    assert find_instance(caps, read_caps(put(tmp_path, MINORS))) == instance


@given(text=st.text(alphabet="gpuic0123456789/access \n", max_size=80))
def test_any_list_of_capabilities_is_read_without_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    known = read_caps(put(tmp_path_factory.mktemp("proc"), text))
    assert all(name.replace("/", "").isdigit() for name in known.values())
