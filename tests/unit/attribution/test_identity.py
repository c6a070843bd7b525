"""How users and accounts are shown, and the key for hashes."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.identity import (
    KEY_FILE,
    KEY_MAX_BYTES,
    KEY_MIN_BYTES,
    MODES,
    Identity,
    KeyUnusable,
    Mode,
    apply_identity,
    load_key,
)
from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.values import CHOICES
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey

KEY = b"0123456789abcdef"
JOB = Holder(HolderKey("slurm", "lab/7/0/1"), job_id="7", user="ada", account="phys", uid="1007", source="slurm")


@pytest.mark.parametrize(
    ("mode", "user", "account"),
    [
        ("name", "ada", "phys"),
        ("uid", "1007", "phys"),
        ("hmac", "3159b903de95cc04", "4b6638d56a0d0d78"),  # as openssl dgst -sha256 -hmac computes them
        ("none", "", ""),
    ],
)
def test_user_and_account_are_shown_as_the_mode_requires(mode: Mode, user: str, account: str) -> None:
    assert apply_identity(JOB, mode, KEY) == JOB._replace(user=user, account=account)


def test_unknown_users_and_accounts_remain_empty() -> None:
    unknown = JOB._replace(user="", account="", uid="")
    for mode in MODES.values():
        assert apply_identity(unknown, mode, KEY) == unknown
    assert apply_identity(JOB._replace(uid=""), "uid", KEY).user == ""  # a name does not replace a number


def test_without_a_key_neither_user_nor_account_is_shown() -> None:
    assert apply_identity(JOB, "hmac", None) == JOB._replace(user="", account="")


def test_a_name_that_is_not_utf_8_has_its_own_hash() -> None:
    shown = {
        apply_identity(JOB._replace(user=name), "hmac", KEY).user for name in ("ad\udcff", "ad\udcfe", "ad?", "ad")
    }
    assert len(shown) == 4


NAMES = st.text(st.characters(blacklist_categories=("Cs",)), min_size=3, max_size=40)


@given(NAMES, NAMES, st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=64))
def test_a_hash_is_stable_and_differs_by_user_key_and_kind(a: str, b: str, key: bytes, other: bytes) -> None:
    def shown(name: str, with_key: bytes) -> Holder:
        return apply_identity(JOB._replace(user=name, account=name), "hmac", with_key)

    first = shown(a, key)
    assert first == shown(a, key)
    assert (first.user == shown(b, key).user) == (a == b)
    assert first.user != first.account
    if key.rstrip(b"\0") != other.rstrip(b"\0"):  # HMAC pads short keys with zeros
        assert first.user != shown(a, other).user
    assert len(first.user) == 16
    assert a not in (first.user, first.account)


@pytest.fixture(params=[0o000, 0o077], ids=["umask 000", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_the_key_is_made_once_and_readable_only_for_its_owner(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert len(key) >= 32
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert load_key(tmp_path) == key
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_the_key_is_made_only_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another file system cannot be linked there, and a container may have no /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert load_key(tmp_path)


def test_a_sites_own_key_is_one_whole_line_of_16_to_4095_bytes(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    for size in (KEY_MIN_BYTES, KEY_MAX_BYTES - 1):
        path.write_bytes(b"k" * size + b"\n")
        path.chmod(0o600)
        assert load_key(tmp_path) == b"k" * size
    for data, error in (
        (b"k" * (KEY_MIN_BYTES - 1) + b"\n", "15 bytes are too short"),
        (b"k" * KEY_MIN_BYTES, "write it as one line with a line break at its end"),
        ((b"k" * KEY_MIN_BYTES + b"\n") * 2, "write it as one line with a line break at its end"),
        (b"k" * KEY_MAX_BYTES + b"\n", "longer than 4096 bytes"),
    ):
        path.write_bytes(data)
        with pytest.raises(KeyUnusable, match=error):
            load_key(tmp_path)


def test_two_processes_that_make_a_key_get_the_same_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(load_key(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def test_an_exposed_or_empty_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    load_key(tmp_path)
    for mode in (0o644, 0o640, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(KeyUnusable) as open_to_others:
            load_key(tmp_path)
        assert str(open_to_others.value) == f"{path}: other users can read or change it (mode {mode:04o}); chmod 600 it"
    path.chmod(0o600)
    path.write_bytes(b"\n")
    with pytest.raises(
        KeyUnusable, match="0 bytes are too short for a key; remove the file, and the exporter makes a new key"
    ):
        load_key(tmp_path)


def test_the_error_names_a_missing_directory(tmp_path: Path) -> None:
    identity = Identity("hmac", tmp_path / "none")
    assert identity.apply(JOB, hidden=False) == JOB._replace(user="", account="")
    path = tmp_path / "none" / KEY_FILE
    assert identity.problem == (
        f"users and accounts are not shown: {path}: No such file or directory as uid {os.geteuid()}; make it readable "
        "for that user, or set identity.user"
    )
    (tmp_path / "none").mkdir()
    assert identity.apply(JOB, hidden=False).user
    assert identity.problem == ""


def test_without_a_state_directory_hashes_have_no_key() -> None:
    identity = Identity("hmac", None)
    assert identity.apply(JOB, hidden=False).user == ""
    assert "set --state.directory" in identity.problem


def test_no_key_is_made_if_none_is_needed(tmp_path: Path) -> None:
    for setting in ("auto", "name", "uid", "none"):
        identity = Identity(setting, tmp_path)
        identity.apply(JOB, hidden=False)
        assert identity.problem == ""
    Identity("hmac", tmp_path).apply(JOB._replace(user="", account=""), hidden=False)  # a pod has no user
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("known", [{"account": ""}, {"user": ""}])
def test_a_user_alone_and_an_account_alone_need_the_key(tmp_path: Path, known: dict[str, str]) -> None:
    shown = Identity("hmac", tmp_path).apply(JOB._replace(**known), hidden=False)
    assert (len(shown.user), len(shown.account)) == (16 * ("user" not in known), 16 * ("account" not in known))


def test_a_missing_key_is_logged_once_until_the_reason_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity("hmac", tmp_path)
    (tmp_path / KEY_FILE).touch(0o644)
    with caplog.at_level(logging.INFO):
        for mode in (0o644, 0o644, 0o644, 0o640):
            (tmp_path / KEY_FILE).chmod(mode)
            identity.apply(JOB, hidden=False)
        (tmp_path / KEY_FILE).unlink()
        identity.apply(JOB, hidden=False)
    assert [mode for text in caplog.messages for mode in ("0644", "0640") if mode in text] == ["0644", "0640"]


def test_the_configuration_offers_every_mode() -> None:
    assert set(CHOICES["identity.user"]) == {"auto", *MODES}


class Scripted:
    """A source with one job of ada. It fails while `answer` is missing."""

    def __init__(self, name: str, answer: bool | None) -> None:
        self.name = name
        self.hides_users = answer

    def poll(self) -> Answer:
        if self.hides_users is None:
            raise SourceError("controller is away")
        holder = JOB._replace(source=self.name, key=HolderKey("slurm", self.name))
        return Answer([Grant("uuid", f"GPU-{self.name}", holder)], hides_users=self.hides_users)


def users(poller: Poller, ask: bool = True) -> list[str]:
    grants: Sequence = poller.poll() if ask else poller.grants()
    return [entry.holder.user for entry in grants]


def test_auto_shows_names_until_a_source_hides_them(tmp_path: Path) -> None:
    slurm, static = Scripted("slurm", False), Scripted("static", False)
    poller = Poller([static, slurm], ManualClock(), 300.0, Identity("auto", tmp_path))
    assert users(poller) == ["ada", "ada"]
    slurm.hides_users = True
    hashed = users(poller)
    assert len(set(hashed)) == 1  # the file that a prolog writes must not show what Slurm hides
    assert "ada" not in hashed
    slurm.hides_users = None  # Slurm no longer answers: its last answer still applies
    assert users(poller) == hashed
    again = Poller([static, Scripted("slurm", True)], ManualClock(), 300.0, Identity("auto", tmp_path))
    assert users(again) == hashed  # after a restart


def test_auto_shows_no_name_before_every_source_has_answered(tmp_path: Path) -> None:
    slurm = Scripted("slurm", None)
    poller = Poller([Scripted("static", False), slurm], ManualClock(), 300.0, Identity("auto", tmp_path))
    assert "ada" not in users(poller)
    slurm.hides_users = False
    assert users(poller) == ["ada", "ada"]


@pytest.mark.parametrize(("setting", "user"), [("name", "ada"), ("uid", "1007"), ("none", "")])
def test_an_explicit_setting_overrides_a_source_that_hides_users(tmp_path: Path, setting: str, user: str) -> None:
    poller = Poller([Scripted("slurm", True)], ManualClock(), 300.0, Identity(setting, tmp_path))
    assert users(poller) == [user]


def test_a_missing_key_is_a_warning() -> None:
    poller = Poller([Scripted("slurm", True)], ManualClock(), 300.0, Identity("auto", None))
    assert poller.warnings() == ()
    assert users(poller) == [""]
    assert poller.warnings() == (
        "users and accounts are not shown: identity.user=hmac needs a state directory for its key; set --state.directory",
    )
