"""The name of a job's user: a placeholder is never the name of two users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.slurm.users import UID_MAX, is_placeholder, name_user, read_uid

PLACEHOLDERS = ["nobody", "", "(null)", "NULL", "Unknown", "N/A", " Nobody ", "nfsnobody", "4294967294", "1001", "1002"]


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_a_placeholder_is_replaced_by_the_uid(name: str) -> None:
    assert name_user(name, "1001") == "uid:1001"


@pytest.mark.parametrize("uid", ["", "4294967294", "4294967295", "-1", "N/A", "(null)", "0x3e9"])
def test_a_placeholder_without_a_uid_is_no_name(uid: str) -> None:
    assert name_user("nobody", uid) == ""
    assert name_user("4294967294", uid) == ""
    assert name_user("1001", uid) == "uid:1001"
    assert name_user("ada", uid) == "ada"


def test_the_user_nobody_keeps_the_name_with_the_uid_of_nobody_alone() -> None:
    assert name_user("nobody", "65534") == "nobody"
    assert name_user("Unknown", "65534") == "uid:65534"
    assert name_user("nobody", "99") == "uid:99"


@pytest.mark.parametrize(
    "name", ["ada", "CORP\\ada.l", "ada@corp.example.com", "ada lovelace", "jürgen", "nobody2", "root"]
)
def test_a_name_stays_as_slurm_prints_it(name: str) -> None:
    assert name_user(name, "0") == name


WORDS = st.sampled_from(PLACEHOLDERS) | st.text(max_size=8)
UIDS = st.sampled_from(["65534", "0", "1001", "4294967294", ""]) | st.integers(0, 2**33).map(str)


@given(WORDS, UIDS, WORDS, UIDS)
def test_two_uids_share_a_name_only_if_it_is_a_real_name(name: str, uid: str, other: str, other_uid: str) -> None:
    shown = name_user(name, uid)
    if shown and uid != other_uid and read_uid(uid) and read_uid(other_uid) and is_placeholder(name, uid):
        assert shown == f"uid:{uid}"
        assert shown != name_user(other, other_uid) or other == shown


@given(st.text(max_size=12))
def test_any_text_is_a_uid_in_digits_or_none(text: str) -> None:
    uid = read_uid(text)
    assert not uid or 0 <= int(uid) <= UID_MAX
