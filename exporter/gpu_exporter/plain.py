"""Text from outside, made fit for a terminal, a log line, a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

LAST_WALL = 253402300799.0  # the end of the year 9999, beyond which dates cannot be written
SHOWN_FOR_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
DIGEST = 16  # hexadecimal digits; two texts that were cut alike stay two


def one_line(text: str) -> str:
    """Without line breaks, terminal escapes, and what turns the direction of writing."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else SHOWN_FOR_UNPRINTABLE for character in text)


def encodable(text: str) -> str:
    """Text that UTF-8 can hold: half of a surrogate pair, which JSON and names of files can bring, is spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shorten(text: str, most: int) -> str:
    """At most `most` characters; a longer text ends in the digest of the whole, so that no two become one."""
    if len(text) <= most:
        return text
    import hashlib  # only a hostile name costs its memory

    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST // 2).hexdigest()
    return f"{text[: most - DIGEST - 1]}~{digest}"


def utc(wall: float) -> datetime:
    """Unix seconds as a date; those of a clock or a peer gone wrong as the nearest date that can be written."""
    return datetime.fromtimestamp(0.0 if math.isnan(wall) else min(max(wall, 0.0), LAST_WALL), timezone.utc)


def layout(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[str] = frozenset()) -> list[str]:
    """Pad cells to columns, two spaces apart; columns named in `right` are right-aligned. Each row is one line."""
    lines = [header, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
