"""Shows users and accounts by name, by number, as a keyed hash, or not at all (the setting `identity.user`).

Slurm's PrivateData hides jobs or users from other users, so an open port must not show them. With `auto`, the exporter
shows hashes if a source hides users, and until every source has answered once.

A hash is an HMAC-SHA-256 of the name, cut to 64 bits, so a user always has the same hash. Without the key, an attacker
cannot test names. The key is a file in the state directory. With the same file on every node, a user has the same hash
on all nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

from gpu_exporter.common.files import read_kept
from gpu_exporter.common.model.holders import Holder

log = logging.getLogger(__name__)
Mode: TypeAlias = Literal["name", "uid", "hmac", "none"]
MODES: dict[str, Mode] = {"name": "name", "uid": "uid", "hmac": "hmac", "none": "none"}  # the settings except `auto`
KEY_FILE = "identity.key"
KEY_BYTES = 32
KEY_MIN_BYTES = 16  # shortest key that a site may provide
KEY_MAX_BYTES = 4096
DIGITS = 16  # hexadecimal digits of a hash, 64 bits: among a million users, two share a hash with a chance of 3e-8


class KeyUnusable(Exception):
    """The key cannot be read or made. The text contains the path, the reason and the remedy."""


def apply_identity(holder: Holder, mode: Mode, key: bytes | None) -> Holder:
    """Returns the holder with user and account in the form that `mode` requires. Keeps `uid`, which no output shows.

    Mode `uid` still shows the account's name, because an account is not a person. Mode `hmac` without a key shows
    neither user nor account.
    """
    if mode == "name":
        return holder
    if mode == "uid":
        return holder._replace(user=holder.uid)
    if mode == "hmac" and key is not None:
        return holder._replace(user=_hash(key, "user", holder.user), account=_hash(key, "account", holder.account))
    return holder._replace(user="", account="")


def _hash(key: bytes, kind: str, name: str) -> str:
    """Returns the hash of a name, "" for an empty name. Equal names of user and account have different ones."""
    import hmac  # few sites need it, and `--once` must start within milliseconds

    return (
        hmac.new(key, f"{kind}\0{name}".encode("utf-8", "surrogatepass"), "sha256").hexdigest()[:DIGITS] if name else ""
    )


def load_key(directory: Path) -> bytes:
    """Reads the key in this directory, or makes a new key if it is missing. Raises KeyUnusable."""
    path = directory / KEY_FILE
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read_key(path)
        _make_key(path)
        return _read_key(path)
    except OSError as exc:
        raise KeyUnusable(
            f"{path}: {exc.strerror} as uid {os.geteuid()}; make it readable for that user, or set identity.user"
        ) from exc


def _read_key(path: Path) -> bytes:
    def is_private(status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise KeyUnusable(f"{path}: other users can read or change it (mode {mode:04o}); chmod 600 it")

    data = read_kept(path, KEY_MAX_BYTES, is_private)
    key = data.strip()
    if key and (b"\n" in key or data != key + b"\n"):  # while an administrator copies the key, it may be incomplete
        raise KeyUnusable(f"{path}: the key may be incomplete: write it as one line with a line break at its end")
    if len(key) < KEY_MIN_BYTES:
        raise KeyUnusable(
            f"{path}: {len(key)} bytes are too short for a key; remove the file, and the exporter makes a new key"
        )
    return key


def _make_key(path: Path) -> None:
    """Writes a new key atomically. If two processes make a key, the first key is kept. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{KEY_FILE}-", dir=path.parent)  # mode 0600, whatever the umask is
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(KEY_BYTES).hex().encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()


class Identity:
    """The setting `identity.user` of one node, with its key. The key is read or made at its first use."""

    def __init__(self, setting: str, directory: Path | None) -> None:
        """`setting`: `auto` or one of MODES. `directory`: directory of the key, None without a state directory."""
        self.problem = ""  # why users are not shown, although the mode is hmac
        self._setting = setting
        self._directory = directory
        self._key: bytes | None = None

    def mode(self, hidden: bool) -> Mode:
        """Returns how users are shown now. `hidden`: a source hides its users, or has not answered yet."""
        return MODES.get(self._setting) or ("hmac" if hidden else "name")

    def apply(self, holder: Holder, hidden: bool) -> Holder:
        """Returns the holder in the form that may be shown.

        `hidden`: a source hides its users, or has not answered yet.
        """
        mode = self.mode(hidden)
        if mode == "hmac" and self._key is None and (holder.user or holder.account):
            self._find_key()
        return apply_identity(holder, mode, self._key)

    def _find_key(self) -> None:
        problem = ""
        if self._directory is None:
            problem = "identity.user=hmac needs a state directory for its key; set --state.directory"
        else:
            try:
                self._key = load_key(self._directory)
            except KeyUnusable as exc:
                problem = str(exc)
        problem = f"users and accounts are not shown: {problem}" if problem else ""
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
