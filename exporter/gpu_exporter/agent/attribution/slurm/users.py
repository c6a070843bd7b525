"""Chooses a name for each user of this node's jobs, so that two users never have the same name. A user's uid decides,
because a name alone proves nothing. A placeholder becomes the name that Slurm or the prolog has reported for this uid,
otherwise `uid:N` (common/slurm/users.py). If two uids have the same name (two directories), both become `uid:N`. The
names survive a restart, because hours are counted by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.remembered import Remembered
from gpu_exporter.common.files import PRIVATE
from gpu_exporter.common.slurm.users import is_placeholder, name_uid, read_uid

FILE = "slurm-users.json"
KNOWN_MAX = 10_000  # names that are remembered; further names are shown as Slurm reports them
UIDS_MAX = 2  # remembered for one name: two show that it is not unique


class User(NamedTuple):
    """The user of a job, as Slurm reports it. `uid`: decimal digits, "" if unknown."""

    name: str
    uid: str


class UserNames:
    """The names of the users that had jobs on one node, saved in a file if there is a directory for it.

    Not thread-safe.
    """

    def __init__(self, directory: Path | None, node: str, *, writes: bool = True) -> None:
        """`writes`: whether to write the file."""
        self._file = Remembered(directory, FILE, node, "the list of names with several users", writes=writes)
        self._uids = self._read()
        self._names: dict[str, str] = {}  # by uid, since the start: a uid may get another user
        self._nameless: set[str] = set()  # uids that were shown without a name since the start

    def note(self, users: Iterable[User]) -> None:
        """Remembers the users of jobs. Call it with all users of a poll before `show`."""
        is_new = False
        for name, uid in users:
            uids = self._uids.get(name, ())
            if not read_uid(uid) or is_placeholder(name, uid) or not (uids or len(self._uids) < KNOWN_MAX):
                continue
            if uid not in uids and len(uids) < UIDS_MAX:
                self._uids[name], is_new = (*uids, uid), True
            self._names[uid] = name
        if is_new:
            self._file.write(self._uids, PRIVATE)

    def show(self, user: User) -> User:
        """Returns the user with the name and the uid that may be shown. Both are "" if they are unknown."""
        name, uid = user.name, read_uid(user.uid)
        if is_placeholder(name, uid):
            name = self._names.get(uid, "")
        if not name:
            self._nameless.add(uid)
            return User(name_uid(user.name, uid), uid)
        return User(name_uid("", uid) if len(self._uids.get(name, ())) >= UIDS_MAX else name, uid)

    def list_notices(self) -> list[str]:
        """Returns messages about names that are not shown. They contain no name and no uid, which may be private."""
        notices: list[str] = []
        if nameless := len(self._nameless - self._names.keys()):
            notices.append(
                f"Slurm reported no name for {nameless} users, shown as uid:N: check `getent passwd N` on the host "
                "that asks slurmctld"
            )
        if doubled := sum(len(uids) >= UIDS_MAX for uids in self._uids.values()):
            notices.append(
                f"{doubled} user names belong to several uids; these users are shown as uid:N: check the user "
                "directories"
            )
        return notices

    def _read(self) -> dict[str, tuple[str, ...]]:
        data = self._file.read()
        if data is None:
            return {}
        try:
            return _parse(data)
        except (AttributeError, TypeError, ValueError) as exc:
            self._file.refuse(exc)
            return {}


def _parse(data: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """Parses the content of the file. Raises AttributeError, TypeError or ValueError for any other content."""
    lists = all(isinstance(uids, list) and uids and all(map(read_uid, uids)) for uids in data.values())
    if len(data) > KNOWN_MAX or not lists:
        raise ValueError("a name has no uid, or there are too many names")
    return {name: tuple(map(read_uid, uids)) for name, uids in data.items()}
