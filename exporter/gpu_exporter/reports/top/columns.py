"""Chooses the columns of the table that fit into a window. Pure."""

from __future__ import annotations

from collections.abc import Sequence

ESSENTIAL = ("NODE", "GPU", "UTIL", "HOLDER", "IDLE", "STATE", "CAUSE")
# In this order, as far as they fit; without room for OWNER or WHY, the next ones may still fit.
OTHERS = ("OWNER", "WHY", "POWER", "HELD", "NAME", "MEMORY", "TEMP")
REASON_MIN = 30  # characters; the reason has no column if fewer remain for it
HOLDER_MIN = 12
GAP = 2  # between two columns


def narrow(
    names: Sequence[str], cells: Sequence[Sequence[str]], width: int, order: str
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows with the columns that fit into `width` characters, in the order of `names`. `order`: the
    column by which rows are sorted; it is never dropped. If the window is too narrow for the columns that are always
    shown, causes lose their confidence, and holders lose characters in the middle.
    """
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    wide = {name: max(len(name), *(len(row[name]) for row in rows), 0) for name in names}
    kept = {name for name in names if name in ESSENTIAL or name == order}
    left = width - sum(wide[name] + GAP for name in kept) + GAP
    if left < 0:
        for row in rows:
            row["CAUSE"] = row["CAUSE"].partition(" ")[0]
        left += wide["CAUSE"] - max(len("CAUSE"), *(len(row["CAUSE"]) for row in rows), 0)
        for row in rows:
            row["HOLDER"] = _shorten(row["HOLDER"], max(HOLDER_MIN, wide["HOLDER"] + min(0, left)))
    for name in OTHERS:
        need = wide[name]
        if name == "WHY":  # it gets the remaining width; the columns after it leave at least this much
            need = min(need, max(REASON_MIN, min(width * 2 // 5, left - GAP)))
        if name in kept or need + GAP > left:
            if name in ("OWNER", "WHY", order):
                continue
            break
        kept.add(name)
        left -= need + GAP
    shown = [name for name in names if name in kept]
    return shown, [[row[name] for name in shown] for row in rows]


def _shorten(text: str, most: int) -> str:
    """Cuts characters from the middle of a text that is too long, because names differ at their ends."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"
