"""Decodes protobuf as far as PodResources needs it: the fields of a message, by number.

Wire format: protobuf.dev/programming-guides/encoding. Groups (wire types 3 and 4) are obsolete and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class ProtobufError(ValueError):
    """The bytes are not a protobuf message."""


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ProtobufError(f"varint at byte {position} does not end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def read_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the length-delimited fields of a message in order, as (number, payload). Skips fields of other types."""
    position, end = 0, len(data)
    while position < end:
        tag, position = data[position], position + 1
        if tag > 0x7F:  # nearly every tag and length is one byte long
            tag, position = _read_varint(data, position - 1)
        kind = tag & 7
        if kind == VARINT:
            _, position = _read_varint(data, position)
        elif kind in (FIXED64, FIXED32):
            position += 8 if kind == FIXED64 else 4
        elif kind == LENGTH:
            if position < end and data[position] < 0x80:
                length, position = data[position], position + 1
            else:
                length, position = _read_varint(data, position)
            payload = data[position : position + length]
            if len(payload) != length:
                raise ProtobufError(f"field {tag >> 3} is cut off at byte {position}")
            position += length
            yield tag >> 3, payload
        else:
            raise ProtobufError(f"wire type {kind} at byte {position} is not supported")
    if position > end:
        raise ProtobufError("message is cut off")


class Stream:
    """Reads a message that arrives in chunks. Only the chunk and the payload that is being read are in memory.

    `position`: number of bytes that were read. All methods raise ProtobufError if the message is cut off.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.position = 0
        self._chunks = iter(chunks)
        self._data = b""
        self._at = 0  # of the next byte in `_data`

    def read_fields(self, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the length-delimited fields up to position `end` (None: the end of the stream), as (number, size).

        The caller reads or skips the payload before it takes the next field. Skips fields of other types.
        """
        while self.position < end if end is not None else self._has(1):
            tag = self._read_varint()
            kind = tag & 7
            if kind == VARINT:
                self._read_varint()
            elif kind in (FIXED64, FIXED32):
                self.skip(8 if kind == FIXED64 else 4)
            elif kind == LENGTH:
                size = self._read_varint()
                if end is not None and self.position + size > end:
                    raise ProtobufError(f"field {tag >> 3} is cut off at byte {self.position}")
                yield tag >> 3, size
            else:
                raise ProtobufError(f"wire type {kind} at byte {self.position} is not supported")
        if end is not None and self.position > end:
            raise ProtobufError("message is cut off")

    def take(self, size: int) -> bytes:
        if not self._has(size):
            raise ProtobufError("message is cut off")
        start, self._at = self._at, self._at + size
        self.position += size
        return self._data[start : self._at]

    def skip(self, size: int) -> None:
        """Skips the next `size` bytes, a chunk at a time."""
        while size:
            if not self._has(1):
                raise ProtobufError("message is cut off")
            step = min(size, len(self._data) - self._at)
            self._at += step
            self.position += step
            size -= step

    def _has(self, size: int) -> bool:
        """Returns whether `size` more bytes arrive, and has them in memory then."""
        if len(self._data) - self._at >= size:
            return True
        parts, there = [self._data[self._at :]], len(self._data) - self._at
        for chunk in self._chunks:
            parts.append(chunk)
            there += len(chunk)
            if there >= size:
                break
        self._data, self._at = b"".join(parts), 0
        return there >= size

    def _read_varint(self) -> int:
        if self._has(1) and (byte := self._data[self._at]) < 0x80:  # nearly every tag and length
            self._at += 1
            self.position += 1
            return byte
        value = shift = 0
        while shift <= 63 and self._has(1):
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ProtobufError(f"varint at byte {self.position} does not end")


def read_text(payload: bytes) -> str:
    """Returns the text of a string field. Protobuf strings are UTF-8."""
    return payload.decode("utf-8", "replace")
