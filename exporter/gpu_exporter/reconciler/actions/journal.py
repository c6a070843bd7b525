"""What was begun and done: written before each act, completed after it, and gone over by each cycle. Pure.

It is a short text that outlives the process: an annotation of the leader's Lease, or a file. So a crash, or an answer
that was lost, leaves an entry that the next cycle completes by what the live object says. The limits per hour are
counted in it, since a process that crashes and starts again must not begin from nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from gpu_exporter.config.values import ACTIONS
from gpu_exporter.outside import need_real
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.target import place

KEY = "journal"  # of the text, in its place
ENTRIES_MAX = 16
HOUR_S = 3600.0
CONFIRM_S = 120.0  # a request whose answer was lost may still arrive for so long
GIVE_UP_S = HOUR_S  # what is not clear by then is said to be so
TEXT_MAX = 64 * 1024
VERSION = 1


class Entry(NamedTuple):
    """One act. `wall`: when it was begun (Unix seconds). `target`: what it was about; `lever`: what was changed for it,
    the target itself or Kueue's Workload. `note`: what is written on both. `since_wall`: since when its GPUs were idle.
    `record`: policy, class and tenant, as they are counted. `holders`: names of those that it ends, some where they are
    many. `waited_for`: by pool, how many GPUs were waited for. `told`: what became of it, "" while that is not known.
    """

    ident: str
    wall: float
    scheduler: str
    namespace: str
    verb: str
    target: Reference
    lever: Reference
    note: str
    gpus: int = 0
    since_wall: float = 0.0
    undo: str = ""
    record: tuple[str, str, str] = ("", "", "")
    holders: tuple[str, ...] = ()
    waited_for: tuple[tuple[str, float], ...] = ()
    told: str = ""

    @property
    def title(self) -> str:
        """The target as people know it, with its namespace."""
        return place(self.target, self.namespace)


class TextPlace(Protocol):
    """Where texts are kept that outlive the process. Every call may raise MarkError."""

    def read_text(self, key: str) -> str:
        """What is kept under this name, "" for nothing."""

    def write_text(self, key: str, text: str) -> None:
        """Keep it in place of what was there."""


class Journal:
    """The entries, oldest first. Every call may raise MarkError: then nothing was kept, and nothing may be begun."""

    def __init__(self, texts: TextPlace) -> None:
        self._texts = texts

    def read(self) -> tuple[Entry, ...]:
        return parse(self._texts.read_text(KEY))

    def begin(self, entry: Entry) -> None:
        """Keep an intent; the oldest entries that are told make room for it."""
        entries = list(self.read())
        while len(entries) >= ENTRIES_MAX:
            oldest = next((each for each in entries if each.told), None)
            if oldest is None:
                raise MarkError("limit", f"{len(entries)} acts are begun, and what became of them is not known yet")
            entries.remove(oldest)
        self._write([*entries, entry])

    def complete(self, ident: str, told: str) -> None:
        """Keep what became of an entry."""
        self._write(each._replace(told=told) if each.ident == ident else each for each in self.read())

    def _write(self, entries: Iterable[Entry]) -> None:
        self._texts.write_text(KEY, render(entries))


def begun_within(entries: Sequence[Entry], wall: float, seconds: float = HOUR_S) -> int:
    """Acts that were begun in this time before `wall`; one of the future counts, since a clock was wrong."""
    return sum(wall - entry.wall < seconds for entry in entries)


def render(entries: Iterable[Entry]) -> str:
    return json.dumps({"v": VERSION, "entries": [list(entry) for entry in entries]}, separators=(",", ":"))


def parse(text: str, longest: int = TEXT_MAX) -> tuple[Entry, ...]:
    """The entries of a text of so many characters at most.

    Raises MarkError for a text in another format: what was begun is unknown then.
    """
    if not text:
        return ()
    if len(text) > longest:
        raise MarkError("journal", f"the journal has {len(text)} characters, and should have {longest} at most")
    try:
        kept = json.loads(text)
        if kept["v"] != VERSION:
            raise MarkError("journal", f"the journal is of version {kept['v']!r}, this is {VERSION}")
        return tuple(_entry(*row) for row in kept["entries"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        remedy = f"remove it (key {KEY}) once it is clear what was done"
        raise MarkError("journal", f"the journal cannot be read ({type(exc).__name__}); {remedy}") from exc


def _entry(*row: Any) -> Entry:
    entry = Entry(*row)
    texts = (entry.ident, entry.scheduler, entry.namespace, entry.verb, entry.note, entry.undo, entry.told)
    numbers = (entry.wall, entry.gpus, entry.since_wall)
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        and entry.verb in ACTIONS
    ):
        raise TypeError
    policy, kind, tenant = map(str, entry.record)
    return entry._replace(
        target=Reference(*map(str, entry.target)),
        lever=Reference(*map(str, entry.lever)),
        record=(policy, kind, tenant),
        holders=tuple(map(str, entry.holders)),
        waited_for=tuple((str(pool), need_real(gpus)) for pool, gpus in entry.waited_for),
    )
