"""Slurm's lists of generic resources (GRES): `gpu:h100:2(IDX:0,2-3),shard:1(0/4,1/4)`. Pure.

Rules: slurm.conf(5) "Gres", gres.conf(5), and the output of 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from gpu_exporter.common.outside import need_whole
from gpu_exporter.common.slurm.hostlist import parse_ranges

UNSET = ("(null)", "N/A")
# GPUs, or shares of GPUs, in a GRES list: name, type, count, and the text in brackets. The site chooses the types. A
# missing type is left out, or "(null)" (22.05, in lines with Cores=).
GRES = re.compile(
    r"(?:gres[:/])?(?P<name>gpu|shard|mps)(?::(?P<type>\(null\)|[^\s:,()]+))??(?::(?P<count>\d+)[KMGTP]?)?"
    r"(?:\((?P<detail>[^()]*)\))?"
)
# Network cards, licences, bandwidth.
OTHER = re.compile(r"(?!(?:gres[:/])?(?:gpu|shard|mps)(?:[:(]|$))[^\s:,()](?:[^\s,()]|\([^()]*\))*")
SHARES = re.compile(r"(?:\d+|-)/\d+(?:,(?:\d+|-)/\d+)*")
MAX_GRES_TEXT = 65_536


class Gres(NamedTuple):
    """The GPUs of one GRES list. `shared`: GPUs that are used in part, and how they are divided (shard, mps).

    `unnamed`: the number of GPUs without an index. `unnamed_share`: the list's item for a part of an unnamed GPU.
    """

    indexes: tuple[int, ...] = ()
    unnamed: int = 0
    shared: tuple[tuple[int, str], ...] = ()
    unnamed_share: str = ""

    @property
    def devices(self) -> int | None:
        """How many GPUs the list names, whole or in part. None if a share names no GPU."""
        named = {*self.indexes, *(index for index, _ in self.shared)}
        return None if self.unnamed_share else len(named) + self.unnamed


def add_devices(lists: Iterable[Gres]) -> int | None:
    """Counts the devices in the lists of one job (one list per node), None if any list's number is unknown."""
    counts = [each.devices for each in lists]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def parse_gres(text: str) -> Gres:
    """Parses `gpu:h100:2(IDX:0,2-3),shard:1(0/4,1/4)` and similar lists, of a job or of a node's GresUsed.

    Raises ValueError for a list that cannot be parsed.
    """
    if len(text) > MAX_GRES_TEXT:
        raise ValueError(f"the GRES list has {len(text)} characters; the limit is {MAX_GRES_TEXT}")
    indexes: list[int] = []
    shared: dict[int, str] = {}
    unnamed = 0
    unnamed_share = ""
    for item in split_gres(text):
        match = GRES.fullmatch(item)
        if not match and OTHER.fullmatch(item):
            continue
        if not match:
            raise ValueError(f"cannot parse the GRES {item[:80]!r}")
        name, count = match["name"], need_whole(match["count"] or 1)
        detail = match["detail"] or ""
        if name in ("shard", "mps"):
            found = _parse_shares(detail)
            shared |= dict.fromkeys(found, name)
            if count and not found:
                unnamed_share = unnamed_share or item
        elif name == "gpu":
            found = _parse_index(detail)
            indexes += found
            unnamed += max(0, count - len(found))
    if len(set(indexes)) != len(indexes):
        raise ValueError(f"{text[:80]!r} contains one index twice")
    return Gres(tuple(indexes), unnamed, tuple(sorted(shared.items())), unnamed_share)


def split_gres(text: str) -> list[str]:
    """Returns the items between commas outside of brackets. Raises ValueError."""
    if text in UNSET or not text:
        return []
    items, start, depth = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth not in (0, 1):
            break
        if character == "," and not depth:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"{text[:80]!r}: brackets do not match")
    return [*items, text[start:]]


def _parse_index(detail: str) -> list[int]:
    """Converts `IDX:0,2-3` to numbers. `IDX:N/A` and `S:0-1` (sockets) name no GPU."""
    kind, _, numbers = detail.partition(":")
    if kind != "IDX" or numbers in ("", "N/A"):
        return []
    return parse_ranges(numbers)


def _parse_shares(detail: str) -> list[int]:
    """The indexes of the GPUs in a share: `IDX:1`, or since 23.11 the allocated part of each GPU, `0/4,1/4,-/4`."""
    if not SHARES.fullmatch(detail):
        return _parse_index(detail)
    return [index for index, part in enumerate(detail.split(",")) if part.partition("/")[0].strip("0-")]
