"""Decodes a log of nvidia-smi, and converts the local times of its rows to seconds.

`nvidia-smi > FILE` writes UTF-16 in PowerShell 5 and UTF-8 elsewhere, so the byte order mark decides. The times have no
time zone. The clock of a time zone is set at a full hour between 23:00 and 4:00, by an hour or (Lord Howe Island) half
an hour (tz database: asia, australasia, europe, northamerica). A jump of the time counts as such a change if the rows
continue on both sides of it. Any other time that goes back is an error of the clock or of the file.
"""

from __future__ import annotations

import codecs
from datetime import datetime, timedelta

MARKS = (  # that of UTF-32 begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
REMEDY = "convert it with iconv -t UTF-8, or write it in PowerShell with `| Out-File -Encoding utf8 FILE`"
CHANGES = (timedelta(hours=1), timedelta(minutes=30))
HOURS_BEFORE = (22, 23, 0, 1, 2, 3)  # in the hour after one of these, a change happens
LATE = timedelta(minutes=1)  # ... and two intervals: the longest time between rows that continue


def decode_log(data: bytes) -> str:
    """Returns the text of a log, without byte order marks. Drops an incomplete last character. Raises ValueError if the
    text has no byte order mark and is not UTF-8, or does not fit its mark.
    """
    encoding = next((encoding for mark, encoding in MARKS if data.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in data:  # the UTF-16 of ASCII is also valid UTF-8
        raise ValueError(f"the text contains NUL bytes, as UTF-16 without a byte order mark does: {REMEDY}")
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError as exc:
        kind = "has no byte order mark and is not UTF-8" if encoding == "utf-8" else f"is not {encoding} as marked"
        raise ValueError(f"the text {kind} ({exc.reason} at byte {exc.start}): {REMEDY}") from exc
    return text.replace("\ufeff", "")


class LocalTimes:
    """Converts the local times of consecutive rows to seconds since the first row.

    `shift`: seconds to add to the present local times, because summer time has changed the clock since the first row.
    """

    def __init__(self) -> None:
        self.shift = timedelta()
        self._first: datetime | None = None
        self._last = datetime.min
        self._step = timedelta()  # between the last two rows
        self._is_behind = False  # the row above was not after the last one: it shows no change of the clock

    def convert(self, when: datetime, *, joined: bool = False) -> float | None:
        """Returns the seconds since the first row, None for a row that is not after the last one.

        `joined`: another log begins with this row, so an earlier time is not a change of the clock.
        """
        if self._first is None:
            self._first = self._last = when
            return 0.0
        step = when - self._last
        correction = timedelta() if joined or self._is_behind else self._correct(step)
        self._is_behind = step + correction <= timedelta()
        if self._is_behind:
            return None
        self._last, self._step, self.shift = when, step + correction, self.shift + correction
        return (when - self._first + self.shift).total_seconds()

    def _correct(self, step: timedelta) -> timedelta:
        """Returns the correction for this and all later local times; 0 if summer time did not begin or end here.
        `step`: time since the last row, by the local clock.
        """
        most = 2 * self._step + LATE
        if timedelta() < step <= most or self._last.hour not in HOURS_BEFORE:
            return timedelta()
        to_full_hour = timedelta(hours=1) - (self._last - self._last.replace(minute=0, second=0, microsecond=0))
        found = [
            correction
            for change in CHANGES
            for correction in (change, -change)
            if step + correction >= to_full_hour and timedelta() < step + correction <= most
        ]
        return min(found, key=lambda each: abs(step + each - self._step), default=timedelta())
