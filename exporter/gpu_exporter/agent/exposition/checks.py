"""The named checks of a node's GPUs (`--check`), and the line about those that fail. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.common.plain import one_line

ALL, DEVICES = "all", "devices"
CHECKS = {
    "lost": "a GPU does not answer, or the driver does not list it",
    "xid": "in the last hour, the driver reported an XID that means a hardware fault",
    "remap": "the GPU could not remap a memory row",
    "reset": "the driver asks for a reset, a drain or a reboot",
    "fabric": "the GPU has no NVLink fabric, or its NVLinks are down",
    "ready": "the GPU is not in ready state (confidential computing)",
    "count": "a scheduler counts more GPUs here than answer",
}
OF_DEVICES = frozenset(CHECKS.keys() - {"xid"})  # a program may cause an XID, so a site decides whether it counts
LINE_MAX = 185  # characters; with "gpu-exporter: " before it, a reason of Slurm stays under 200
TEXT_MIN = 16  # characters; a shorter piece of a text does not name the GPU and the fault


class FailedCheck(NamedTuple):
    """One failed check of one GPU, or of the node. `text`: a clause that names the GPU. `remedy`: what to do."""

    check: str
    text: str
    remedy: str


def parse_checks(text: str) -> frozenset[str] | None:
    """Returns the checks in `lost,xid`; None for `all`, which adds failed calls and failed sources of holders.

    Raises ValueError for an unknown name.
    """
    if text == ALL:
        return None
    if text == DEVICES:
        return OF_DEVICES
    names = frozenset(each.strip() for each in text.split(","))
    if unknown := sorted(names - CHECKS.keys()):
        known = ", ".join(CHECKS)
        raise ValueError(f"{unknown[0]!r} is not a check: use {ALL}, {DEVICES}, or a list of: {known}")
    return names


def join_failed(failed: Sequence[FailedCheck]) -> str:
    """Returns one line of at most LINE_MAX characters with each failed check, its first text and the remedy.

    The texts share the space. If it is too short for them, the line has only checks and remedies.
    """
    numbers = Counter(each.check for each in failed)
    first = {each.check: each for each in reversed(failed)}
    ordered = [first[name] for name in CHECKS if name in first]
    plain = [f"{each.check} ({each.remedy})" for each in ordered]
    tails = [f" and {more} more" if (more := numbers[each.check] - 1) else "" for each in ordered]
    space = LINE_MAX - sum(len(each) + len(": ") + len("; ") for each in plain) - sum(map(len, tails))
    texts = _share([each.text for each in ordered], space)
    if texts is None:
        parts = plain
    else:
        rows = zip(ordered, texts, tails, strict=True)
        parts = [f"{each.check}: {text}{tail} ({each.remedy})" for each, text, tail in rows]
    return one_line("; ".join(parts))[:LINE_MAX]


def _share(texts: Sequence[str], space: int) -> list[str] | None:
    """Cuts the longest texts until all fit into `space` characters. None if pieces of TEXT_MIN do not fit."""
    most = max((len(text) for text in texts), default=0)
    while sum(min(len(text), most) for text in texts) > space:
        most -= 1
        if most < TEXT_MIN:
            return None
    return [text if len(text) <= most else f"{text[: most - 3]}..." for text in texts]
