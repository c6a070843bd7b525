"""Decodes protobuf as far as PodResources needs it: the fields of a message, by number.

Wire format: protobuf.dev/programming-guides/encoding. Groups (wire types 3 and 4) are obsolete and refused.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """Yields the length-delimited fields of a message in their order, as (number, payload). Skips fields of other
    types.
    """
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


def read_text(payload: bytes) -> str:
    """Returns the text of a string field. Protobuf strings are UTF-8."""
    return payload.decode("utf-8", "replace")
