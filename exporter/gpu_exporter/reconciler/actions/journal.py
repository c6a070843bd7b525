"""The journal of actions. An entry is written before each action and completed after it; every cycle checks it. Pure.

The journal is a short text that survives a restart: an annotation of the leader's Lease, or a file. After a crash or a
lost answer, the next cycle completes the entry from the live object. The hourly limits are counted from the journal, so
a restart does not reset them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_exporter.common.config.values import ACTIONS
from gpu_exporter.common.outside import need_real
from gpu_exporter.reconciler.actor import Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.texts import TextPlace

KEY = "journal"  # key of the text in its TextPlace
ENTRIES_MAX = 16
HOUR_S = 3600.0
CONFIRM_S = 120.0  # how long a request without an answer may still reach the server
GIVE_UP_S = HOUR_S  # a result that is still unclear after this time is `unconfirmed`
TEXT_MAX = 64 * 1024
VERSION = 1


class Journal:
    """The entries, oldest first. Every call may raise MarkError. Then nothing was saved, and no action may begin."""

    def __init__(self, texts: TextPlace) -> None:
        self._texts = texts

    def read(self) -> tuple[Entry, ...]:
        return parse(self._texts.read_text(KEY))

    def begin(self, entry: Entry) -> None:
        """Adds an entry. The oldest completed entries are removed to make room."""
        entries = list(self.read())
        while len(entries) >= ENTRIES_MAX:
            oldest = next((each for each in entries if each.told), None)
            if oldest is None:
                raise MarkError("limit", f"{len(entries)} actions have begun, and their results are not known yet")
            entries.remove(oldest)
        self._write([*entries, entry])

    def complete(self, ident: str, told: str) -> None:
        """Writes the result of an entry."""
        self._write(each._replace(told=told) if each.ident == ident else each for each in self.read())

    def _write(self, entries: Iterable[Entry]) -> None:
        self._texts.write_text(KEY, render(entries))


def begun_within(entries: Sequence[Entry], wall: float, seconds: float = HOUR_S) -> int:
    """The number of actions that began in the last `seconds` before `wall`.

    Actions with a time in the future count too, because a clock was wrong.
    """
    return sum(wall - entry.wall < seconds for entry in entries)


def render(entries: Iterable[Entry]) -> str:
    return json.dumps({"v": VERSION, "entries": [list(entry) for entry in entries]}, separators=(",", ":"))


def parse(text: str, longest: int = TEXT_MAX) -> tuple[Entry, ...]:
    """The entries of a text.

    `longest`: the maximum length of the text (characters). Raises MarkError for a longer text and for another format,
    because it is then unknown which actions have begun.
    """
    if not text:
        return ()
    if len(text) > longest:
        raise MarkError("journal", f"the journal has {len(text)} characters, more than {longest}")
    try:
        kept = json.loads(text)
        if kept["v"] != VERSION:
            raise MarkError("journal", f"the journal has version {kept['v']!r}, this release reads version {VERSION}")
        return tuple(_entry(*row) for row in kept["entries"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        remedy = f"check which actions were done, then remove it (key {KEY})"
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
