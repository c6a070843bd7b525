"""How users and accounts appear: by name, by number, by a keyed hash, or not at all (the setting `identity.user`).

Slurm's PrivateData hides jobs or users from other users; an open port must not undo that. `auto` therefore shows
hashes as soon as one source says that its site hides them, and until every source has answered once. A hash is an
HMAC-SHA-256 of the name, cut to 64 bits: the same user always has the same one, and without the key names cannot be
tried. The key is a file in the state directory; copied to every node, a user has one hash on all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

from gpu_exporter.model.holders import Holder

log = logging.getLogger(__name__)
Mode: TypeAlias = Literal["name", "uid", "hmac", "none"]
MODES: dict[str, Mode] = {"name": "name", "uid": "uid", "hmac": "hmac", "none": "none"}  # the settings but `auto`
KEY_FILE = "identity.key"
KEY_BYTES = 32
KEY_MIN_BYTES = 16  # of a key that a site made itself
DIGITS = 16  # of a hash in hexadecimal, 64 bits: among a million users two share one with a chance of 3e-8


class KeyUnusable(Exception):
    """The key cannot be read or made. The text says where, why and what to do."""


def apply_identity(holder: Holder, mode: Mode, key: bytes | None) -> Holder:
    """The holder with its user and account as `mode` wants them, and never its `uid` beside them.

    An account is not a person: in `uid` it keeps its name. `hmac` without a key shows neither.
    """
    if mode == "name":
        return holder._replace(uid="")
    if mode == "uid":
        return holder._replace(user=holder.uid, uid="")
    if mode == "hmac" and key is not None:
        return holder._replace(
            user=_hash(key, "user", holder.user), account=_hash(key, "account", holder.account), uid=""
        )
    return holder._replace(user="", account="", uid="")


def _hash(key: bytes, kind: str, name: str) -> str:
    """Of a user and an account with one name two different hashes; of no name none."""
    import hmac  # few sites need it, and `--once` is measured in milliseconds

    return (
        hmac.new(key, f"{kind}\0{name}".encode("utf-8", "surrogatepass"), "sha256").hexdigest()[:DIGITS] if name else ""
    )


def load_key(directory: Path) -> bytes:
    """The key in this directory, made when there is none yet. Raises KeyUnusable."""
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
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        key = file.read(4096).strip()
    if stat.S_IMODE(mode) & 0o077:
        raise KeyUnusable(f"{path}: other users may read or change it (mode {stat.S_IMODE(mode):04o}); chmod 600 it")
    if len(key) < KEY_MIN_BYTES:
        raise KeyUnusable(f"{path}: {len(key)} bytes are too short for a key; remove the file, and the exporter makes a new key")
    return key


def _make_key(path: Path) -> None:
    """Whole or not at all, and the first of two makers wins. Raises OSError."""
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
    """The setting of one node with its key, which is read or made when it is first needed."""

    def __init__(self, setting: str, directory: Path | None) -> None:
        """`setting`: `auto` or one of MODES. `directory`: where the key is kept, None for nowhere."""
        self.problem = ""  # why users are not shown although hashes are wanted
        self._setting = setting
        self._directory = directory
        self._key: bytes | None = None

    def mode(self, hidden: bool) -> Mode:
        """What holds now. `hidden`: some source hides its users, or has not said yet whether it does."""
        return MODES.get(self._setting) or ("hmac" if hidden else "name")

    def apply(self, holder: Holder, hidden: bool) -> Holder:
        """The holder as it may be shown."""
        mode = self.mode(hidden)
        if mode == "hmac" and self._key is None and (holder.user or holder.account):
            self._find_key()
        return apply_identity(holder, mode, self._key)

    def _find_key(self) -> None:
        problem = ""
        if self._directory is None:
            problem = "there is no state directory for the key of identity.user=hmac; set --state.directory"
        else:
            try:
                self._key = load_key(self._directory)
            except KeyUnusable as exc:
                problem = str(exc)
        problem = f"users and accounts are not shown: {problem}" if problem else ""
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
