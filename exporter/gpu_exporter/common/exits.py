"""The exit codes of every command, and the texts about them that the help prints."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The reason why a command ended, as its exit code."""

    DONE = 0
    UNFORESEEN = 1
    USAGE = 2
    NO_DATA = 3
    PARTIAL = 4
    DRIVER_REPLACED = 5


WORDS = {
    Exit.DONE: "done",
    Exit.UNFORESEEN: "an unforeseen error",
    Exit.USAGE: "wrong usage or configuration",
    Exit.NO_DATA: "no GPU data (--once, report, job), no evidence (reconcile)",
    Exit.PARTIAL: "partial data or a failed check of a GPU (--once), partial evidence (reconcile), unreadable "
    "files (report), a job that was not measured or a source that failed (job)",
    Exit.DRIVER_REPLACED: "the driver was replaced under a running exporter",
}


def list_exits() -> str:
    return "".join(f"  {code:d}  {words}\n" for code, words in WORDS.items())
