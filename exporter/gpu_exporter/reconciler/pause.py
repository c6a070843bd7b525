"""A pause that a person starts with `gpu-exporter pause`, while the reconciler continues to run.

The pause is stored in a file, or in annotations of the Lease, so that every replica reads it. While it lasts, the
reconciler marks nothing, and idle time before its end does not count. An unreadable pause is treated as active.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.files import check_kept, read_kept, write_atomically
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.reconciler.evidence.records import Evidence
from gpu_exporter.reconciler.marks import PREFIX, timestamp

UNTIL, REASON = PREFIX + "pause-until", PREFIX + "pause-reason"
FILE_MAX = 64 * 1024


class PauseNote(NamedTuple):
    """A pause until `until_wall` (Unix seconds). If the pause has ended, idle time counts from its end."""

    until_wall: float
    reason: str

    def describe(self, wall: float) -> str:
        """Returns the pause in words, at `wall` (Unix seconds)."""
        reason = one_line(self.reason, REASON_MAX)
        because = f": {reason}" if reason else ""
        lasts = "paused until" if wall < self.until_wall else "not paused; the last pause ended"
        return f"{lasts} {timestamp(self.until_wall)}{because}"


class PauseUnreadable(ForeignError):
    """The pause cannot be read, so it is unknown whether a pause lasts. The text contains the place and the reason."""


class PauseSource(Protocol):
    """Reads whether there is a pause."""

    def read_pause(self) -> PauseNote | None:
        """Returns the latest pause; None if no pause was ever started. Raises PauseUnreadable."""


class PausePlace(PauseSource, Protocol):
    """The place where the pause is stored."""

    def write_pause(self, note: PauseNote) -> None:
        """Replaces the pause. Raises OSError, MarkError."""


def note_facts(note: PauseNote) -> dict[str, str]:
    """Returns the pause as annotations, which are also the keys of the file."""
    return {UNTIL: timestamp(note.until_wall), REASON: one_line(note.reason, REASON_MAX)}


def parse_note(facts: Mapping[str, object], where: str) -> PauseNote | None:
    """Returns the pause in these annotations or keys; None if they contain no pause. Raises PauseUnreadable."""
    text = facts.get(UNTIL)
    if text is None:
        return None
    until = parse_timestamp(str(text))
    if until is None:
        shown = one_line(str(text), 40)
        raise PauseUnreadable(
            f"{where}: {UNTIL} {shown!r} is not a valid timestamp; end the pause with gpu-exporter pause --end"
        )
    return PauseNote(until, one_line(str(facts.get(REASON) or ""), REASON_MAX))


class PauseFile:
    """A pause in a file of this host."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_pause(self) -> PauseNote | None:
        try:
            facts = json.loads(read_kept(self._path, FILE_MAX))
            if not isinstance(facts, dict):
                raise TypeError("not a pause")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise PauseUnreadable(f"{self._path}: {reason}; end the pause with gpu-exporter pause --end") from exc
        return parse_note(facts, str(self._path))

    def write_pause(self, note: PauseNote) -> None:
        check_kept(self._path.parent)
        write_atomically(self._path, (json.dumps(note_facts(note)) + "\n").encode())


def pause(evidence: Evidence, place: PauseSource) -> Evidence:
    """Applies the stored pause: prevents marks while it lasts, and lets idle time start again at its end."""
    try:
        note = place.read_pause()
    except PauseUnreadable as exc:
        return evidence._replace(paused=_join(evidence.paused, f"an unreadable pause counts as active: {exc}"))
    if note is None:
        return evidence
    ended = min(note.until_wall, evidence.wall)
    holders = tuple(each._replace(counts_from=max(ended, each.counts_from or ended)) for each in evidence.holders)
    now = note.describe(evidence.wall) if evidence.wall < note.until_wall else ""
    return evidence._replace(holders=holders, paused=_join(evidence.paused, now))


def _join(*texts: str) -> str:
    return "; ".join(filter(None, texts))
