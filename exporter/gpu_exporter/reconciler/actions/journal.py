"""The journal of actions. An entry is written before each action, checked in every cycle, and completed after the
action. Pure.

The journal is a short text that survives a restart: an annotation of the leader's Lease, or a file. After a crash or a
lost answer, the next cycle completes the entry from the live object. The hourly limits count the entries of the
journal, so a restart does not reset them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from gpu_exporter.common.config.values import ACTIONS
from gpu_exporter.common.outside import need_real
from gpu_exporter.reconciler.actor import ENDING, Ended, Entry
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.texts import TextPlace

KEY = "journal"  # key of the text in its TextPlace
ENTRIES_MAX = 16
HOUR_S = 3600.0
CONFIRM_S = 120.0  # how long a request without an answer may still reach the server
TEXT_MAX = 64 * 1024
VERSION = 1


class Journal:
    """Holds the entries, oldest first. Every call may raise MarkError. Then nothing was saved, and no action begins."""

    def __init__(self, texts: TextPlace) -> None:
        self._texts = texts

    def read(self) -> tuple[Entry, ...]:
        return parse(self._texts.read_text(KEY))

    def begin(self, entry: Entry) -> None:
        """Adds an entry. The oldest completed entries are removed to make room."""
        entries = list(self.read())
        while len(entries) >= ENTRIES_MAX:
            oldest = next((each for each in entries if not each.is_open), None)
            if oldest is None:
                raise MarkError("limit", f"{len(entries)} actions have begun, and their results are not known yet")
            entries.remove(oldest)
        if len(render([*entries, entry])) > TEXT_MAX:  # no process could read it
            why = f"the journal has no room for the {len(entry.ends)} pods or jobs of this action"
            raise MarkError("size", why)
        self._write([*entries, entry])

    def complete(self, ident: str, told: str) -> None:
        self._write(with_result(each, told) if each.ident == ident else each for each in self.read())

    def note_used(self, used: Collection[tuple[str, str]]) -> None:
        """Notes that these actions no longer reduce the demand of these pools."""
        self._write(without_demand(each, used) for each in self.read())

    def _write(self, entries: Iterable[Entry]) -> None:
        self._texts.write_text(KEY, render(entries))


def with_result(entry: Entry, told: str) -> Entry:
    return entry._replace(told=told, ends=entry.ends if told == ENDING else ())


def without_demand(entry: Entry, used: Collection[tuple[str, str]]) -> Entry:
    """Returns the entry without the pools that `used` names for it."""
    return entry._replace(waited_for=tuple(each for each in entry.waited_for if (entry.ident, each[0]) not in used))


def render(entries: Iterable[Entry]) -> str:
    return json.dumps({"v": VERSION, "entries": [list(entry) for entry in entries]}, separators=(",", ":"))


def parse(text: str, longest: int = TEXT_MAX) -> tuple[Entry, ...]:
    """Returns the entries of a text.

    `longest`: the maximum length of the text (characters). Raises MarkError for a longer text or another format,
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
    numbers = (entry.wall, entry.gpus, entry.since_wall, entry.until_wall)
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
        ends=tuple(Ended(str(name), str(run), tuple(map(str, nodes))) for name, run, nodes in entry.ends),
        waited_for=tuple((str(pool), need_real(gpus)) for pool, gpus in entry.waited_for),
    )
