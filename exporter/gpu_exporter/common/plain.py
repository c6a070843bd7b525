"""Makes text from outside safe for a terminal, a log line or a label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

LAST_WALL = 253402300799.0  # the end of the year 9999; Python cannot write later dates
REASON_MAX = 200  # characters of a reason that another program gives, within a message
SHOWN_FOR_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
LINE_MAX = 2000  # characters; the longest message of the exporter itself has 700
DIGEST = 16  # hexadecimal digits; texts that differ only in the part cut off remain different


def one_line(text: str, most: int = LINE_MAX) -> str:
    """Makes foreign text safe for people: one line, at most `most` characters, without terminal escapes.

    Also removes characters that change the writing direction.
    """
    text = shorten(text, most)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else SHOWN_FOR_UNPRINTABLE for character in text)


def encodable(text: str) -> str:
    """Makes a text fit for UTF-8: a lone surrogate, from JSON or a file name, becomes an escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shorten(text: str, most: int) -> str:
    """Cuts the text to `most` characters. A cut text ends in a digest, so that different texts stay different."""
    if len(text) <= most:
        return text
    import hashlib  # imported only here: it takes memory, and only hostile names are this long

    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST // 2).hexdigest()
    return f"{text[: most - DIGEST - 1]}~{digest}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the known word that was probably meant, "" if none is similar."""
    import difflib  # needed only for an error

    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word[:REASON_MAX].lower(), by_lower, 1)
    return by_lower[close[0]] if close else ""


def describe_bug(exc: BaseException) -> str:
    """Returns a text for people about an exception that only a bug can raise. The caller must log the traceback."""
    reason = one_line(str(exc), REASON_MAX)
    return f"internal error ({type(exc).__name__}: {reason}): report it with the traceback in the log"


def describe_yaml(exc: Exception) -> str:
    """Returns the error text for invalid YAML, with line and column. Quotes nothing from the file, which may hold a
    secret or be the wrong file.
    """
    mark = getattr(exc, "problem_mark", None)
    return "not valid YAML" + (f": see line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "")


def utc(wall: float) -> datetime:
    """Converts Unix seconds to a date; a value out of range, from a wrong clock or peer, becomes the nearest date."""
    return datetime.fromtimestamp(0.0 if math.isnan(wall) else min(max(wall, 0.0), LAST_WALL), timezone.utc)


def layout(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[str] = frozenset()) -> list[str]:
    """Lays out a table: header, then rows. Columns are two spaces apart; those in `right` are right-aligned."""
    lines = [header, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def percent(share: float | None) -> str:
    """A share for people, "-" if it is unknown. Only all is 100 %, and only nothing is 0 %."""
    if share is None:
        return "-"
    if 0.0 < share < 0.005:
        return "<1%"
    return f"{math.floor(100.0 * share + 0.5) if share <= 0.99 or share >= 1.0 else 99:d}%"
