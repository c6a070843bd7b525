"""`pause`: starts, extends, ends or shows the pause of a reconciler."""

from __future__ import annotations

import json

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.exits import Exit
from gpu_exporter.reconciler.pause import PauseNote, PausePlace, PauseUnreadable


def start_pause(place: PausePlace, lasts_s: float, reason: str, form: str = "text") -> int:
    """Starts a pause now, which replaces any other pause. Returns the exit code. Raises OSError, MarkError."""
    return _write(place, PauseNote(SYSTEM_CLOCK.wall() + lasts_s, reason), form)


def end_pause(place: PausePlace, form: str = "text") -> int:
    """Ends the pause now. Returns the exit code. Raises OSError, MarkError."""
    now = SYSTEM_CLOCK.wall()
    try:
        note = place.read_pause()
    except PauseUnreadable:
        return _write(place, PauseNote(now, ""), form)
    if note is None or note.until_wall <= now:
        return show_pause(place, form)
    return _write(place, note._replace(until_wall=now), form)


def show_pause(place: PausePlace, form: str = "text") -> int:
    """Prints whether there is a pause. Returns the exit code."""
    try:
        note = place.read_pause()
    except PauseUnreadable as exc:
        _print(None, f"paused, because an unreadable pause is treated as active: {exc}", form, problem=str(exc))
        return Exit.PARTIAL
    _print(note, "not paused" if note is None else note.describe(SYSTEM_CLOCK.wall()), form)
    return Exit.DONE


def _write(place: PausePlace, note: PauseNote, form: str = "text") -> int:
    place.write_pause(note)
    _print(note, note.describe(SYSTEM_CLOCK.wall()), form)
    return Exit.DONE


def _print(note: PauseNote | None, text: str, form: str, problem: str = "") -> None:
    """`text`: the pause in words. `problem`: why the pause is unreadable."""
    if form == "json":
        until = None if note is None else note.until_wall
        facts = {
            "paused": bool(problem) or (until is not None and SYSTEM_CLOCK.wall() < until),
            "until_timestamp_seconds": until,
            "reason": "" if note is None else note.reason,
            "problem": problem,
        }
        text = json.dumps(facts)
    print(text)  # noqa: T201
