"""Lists of an API server, read as a stream: one odd object affects only itself, at any position and in any chunks."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.reconciler.kubernetes.client import stream
from gpu_exporter.reconciler.kubernetes.client.stream import ListReader, NotJson, Odd

LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=12)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
# Odd objects: their text, and the reason why they are left out.
ODD = {
    "huge": ('{"metadata":{"name":"odd","x":"' + "y" * (stream.OBJECT_MAX + 10) + '"}}', "size"),
    "huge of brackets in texts": (
        '{"metadata":{"name":"odd","x":"' + r"}\"]{" * (stream.OBJECT_MAX // 4) + '"}}',
        "size",
    ),
    "huge of escapes": ('{"metadata":{"name":"odd","x":"' + r"\u003c" * (stream.OBJECT_MAX // 4) + '"}}', "size"),
    "huge of quotes": ('{"metadata":{"name":"odd","x":"' + r"\"\\\"" * (stream.OBJECT_MAX // 5) + '"}}', "size"),
    "deep": ('{"metadata":{"name":"odd"},"x":' + "[" * 50_000 + "]" * 50_000 + "}", "malformed"),
    "a number of 5,000 digits": ('{"metadata":{"name":"odd"},"x":' + "9" * 5_000 + "}", "malformed"),
    "not parsed": ('{"metadata":{"name":"odd"},"bad":1}', "malformed"),
    "not kept": ('{"metadata":{"name":"odd"},"heavy":1}', "size"),
}


def keep(found: Any) -> Any:
    if "bad" in found:
        raise KeyError("bad")
    if "heavy" in found:
        raise Odd("size", "too heavy")
    return found


class Read:
    """The result of reading a list that arrived in chunks of these lengths."""

    def __init__(self, text: str, pieces: list[int]) -> None:
        data = text.encode()
        self.odd: list[tuple[str, str]] = []
        cuts, at = [0], 0
        for length in pieces:
            at += length
            cuts.append(min(at, len(data)))
        chunks = (data[a:b] for a, b in zip(cuts, [*cuts[1:], len(data)], strict=True) if a < b)
        reader = ListReader(
            chunks, keep, lambda name, reason, why: self.odd.append((name, reason)), contextlib.nullcontext()
        )
        self.items = list(reader)
        self.token = reader.token


def listed(items: list[str], token: str = "", *, last: bool = False) -> str:
    metadata = f'"metadata":{{"resourceVersion":"7","continue":{json.dumps(token)}}}'
    rows = f'"items":[{" , ".join(items)}]'
    parts = ['"kind":"PodList"', *([rows, metadata] if last else [metadata, rows])]
    return "{ " + ",\n".join(parts) + " }"


PIECES = st.lists(st.integers(1, 40), max_size=30)


@settings(deadline=None)
@given(st.lists(OBJECTS, max_size=6), st.text(max_size=8), st.booleans(), PIECES, st.booleans())
def test_every_object_is_read_whatever_the_length_of_the_chunks(
    objects: list[Any], token: str, last: bool, pieces: list[int], ascii_only: bool
) -> None:
    objects = [{key: value for key, value in each.items() if key not in ("bad", "heavy")} for each in objects]
    text = listed([json.dumps(each, ensure_ascii=ascii_only) for each in objects], token, last=last)
    read = Read(text.encode("utf-8", "replace").decode(), pieces)
    assert read.items == [json.loads(json.dumps(each).encode("utf-8", "replace")) for each in objects] or not ascii_only
    assert len(read.items) == len(objects)
    assert (read.odd, read.token) == ([], token) or not token.isascii()


@pytest.mark.parametrize("kind", ODD)
@settings(max_examples=12, deadline=None)
@given(position=st.integers(0, 49), piece=st.sampled_from([1_000, 65_536, 10**9]))
def test_one_odd_object_among_fifty_affects_only_itself(kind: str, position: int, piece: int) -> None:
    text, reason = ODD[kind]
    good = [json.dumps({"metadata": {"name": f"p{i}", "namespace": "ml"}}) for i in range(49)]
    items = [*good[:position], text, *good[position:]]
    whole = listed(items, "next")
    read = Read(whole, [piece] * (len(whole) // piece))
    assert [json.dumps(each) for each in read.items] == good
    assert read.odd == [("odd", reason)]
    assert read.token == "next"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind":"Status"}',
        '{"items":7}',
        '{"items":{"a":[]}}',
        "<html>",
        "{",
        '{"items":[',
        '{"items":[{}',
        '{"items":[{}]',
        '{"items":[1 2]}',
        '{"items":[{"a":]}',
        "{]",
    ],
)
def test_an_answer_that_is_no_list_is_an_error(text: str) -> None:
    with pytest.raises(NotJson):
        Read(text, [1, 1, 1])


def test_a_list_without_items_is_empty() -> None:
    assert Read('{"items":null,"metadata":{}}', []).items == []


def test_fifty_large_objects_are_never_in_memory_together() -> None:
    pod = json.dumps({"metadata": {"name": "p", "annotations": {"a": "x" * 1_400_000}}})

    def chunks() -> Iterator[bytes]:
        yield b'{"items":['
        for i in range(50):
            data = (("," if i else "") + pod).encode()
            yield from (data[at : at + 65_536] for at in range(0, len(data), 65_536))
        yield b"]}"

    reader = ListReader(chunks(), lambda pod: pod["metadata"]["name"], lambda *_: None, contextlib.nullcontext())
    tracemalloc.start()
    try:
        assert len(list(reader)) == 50
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * 1024 * 1024, "about ten times the size of one object"
