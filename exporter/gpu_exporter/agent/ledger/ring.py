"""Holds the utilization of one unit or holder over the last minutes, for the status page and for diagnosis."""

from __future__ import annotations

from array import array


class Ring:
    """Mean utilization (0 to 1) in buckets of `bucket_s` seconds over the last `length_s` seconds of monotonic time."""

    def __init__(self, length_s: float, bucket_s: float) -> None:
        self.bucket_s = bucket_s
        self._count = max(1, round(length_s / bucket_s))
        self._size = self._count + 2  # the bucket that is being filled, and one bucket for late spans
        self._busy = array("d", bytes(8 * self._size))
        self._known = array("d", bytes(8 * self._size))
        self._newest = -1  # number of the newest bucket since time 0

    def add(self, start: float, end: float, ratio: float) -> None:
        """Adds a span's utilization to the buckets that it covers."""
        first, last = int(start // self.bucket_s), int(end // self.bucket_s)
        for bucket in range(max(first, last - self._size + 1), last + 1):
            length = min(end, (bucket + 1) * self.bucket_s) - max(start, bucket * self.bucket_s)
            if length > 0 and self._advance(bucket):
                slot = bucket % self._size
                self._busy[slot] += length * ratio
                self._known[slot] += length

    def _advance(self, bucket: int) -> bool:
        """Makes `bucket` writable and clears the skipped buckets. Returns False if the bucket is too old."""
        if bucket > self._newest:
            wipe = range(max(self._newest + 1, bucket - self._size + 1), bucket + 1)
            for skipped in wipe:
                self._busy[skipped % self._size] = 0.0
                self._known[skipped % self._size] = 0.0
            self._newest = bucket
        return bucket > self._newest - self._size

    def values(self, now: float, length_s: float | None = None) -> tuple[float | None, ...]:
        """Returns the buckets that ended by `now`, oldest first. A bucket is None if less than half of its time is
        known.
        """
        last = int(now // self.bucket_s) - 1
        count = self._count if length_s is None else min(self._count, max(0, int(length_s / self.bucket_s)))
        result: list[float | None] = []
        for bucket in range(last - count + 1, last + 1):
            slot = bucket % self._size
            fresh = self._newest - self._size < bucket <= self._newest and bucket >= 0
            known = self._known[slot] if fresh else 0.0
            result.append(min(1.0, self._busy[slot] / known) if known >= 0.5 * self.bucket_s else None)
        return tuple(result)
