"""`pause`: begin, extend, end or show the pause of a reconciler."""

from __future__ import annotations

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.exits import Exit
from gpu_exporter.reconciler.pause import PauseNote, PausePlace, PauseUnreadable


def start_pause(place: PausePlace, lasts_s: float, reason: str) -> int:
    """Start a pause now, in place of any other pause. Returns the exit code. Raises OSError, MarkError."""
    return _write(place, PauseNote(SYSTEM_CLOCK.wall() + lasts_s, reason))


def end_pause(place: PausePlace) -> int:
    """End the pause now. Returns the exit code. Raises OSError, MarkError."""
    now = SYSTEM_CLOCK.wall()
    try:
        note = place.read_pause()
    except PauseUnreadable:
        return _write(place, PauseNote(now, ""))
    if note is None or note.until_wall <= now:
        return show_pause(place)
    return _write(place, note._replace(until_wall=now))


def show_pause(place: PausePlace) -> int:
    """Print whether there is a pause. Returns the exit code."""
    try:
        note = place.read_pause()
    except PauseUnreadable as exc:
        print(f"paused, because an unreadable pause is treated as active: {exc}")  # noqa: T201
        return Exit.PARTIAL
    print("not paused" if note is None else note.describe(SYSTEM_CLOCK.wall()))  # noqa: T201
    return Exit.DONE


def _write(place: PausePlace, note: PauseNote) -> int:
    place.write_pause(note)
    print(note.describe(SYSTEM_CLOCK.wall()))  # noqa: T201
    return Exit.DONE
