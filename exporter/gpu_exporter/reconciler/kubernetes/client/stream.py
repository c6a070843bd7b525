"""Reads the list in an answer of an API server object by object. Only one object, of up to 2 MiB, is in memory.

The standard library's JSON decoder decodes one value at a given position, so only the text of the current object is
stored. The object is dropped after `keep` has extracted the needed part.

An object that is too long, nested too deeply or malformed affects only itself: it is skipped and reported.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# Characters. etcd accepts requests of 1.5 MiB (--max-request-bytes); JSON is longer only if characters are escaped.
OBJECT_MAX = 2 * 1024 * 1024
DECODER = json.JSONDecoder()
FOLLOWS = frozenset(",]} \t\r\n")
NOT_SPACE = re.compile(r"[^ \t\r\n]")
BRACKETS = re.compile(r'["{}\[\]]')
# The beginning of an object as an API server writes it.
NAMED = re.compile(
    r'{\s*(?:"apiVersion":\s*"[^"\\]*",\s*)?(?:"kind":\s*"[^"\\]*",\s*)?'
    r'"metadata":\s*{\s*"name":\s*"([^"\\]{1,253})"'
    r'(?:,\s*"generateName":\s*"[^"\\]*")?(?:,\s*"namespace":\s*"([^"\\]{1,253})")?'
)
HEAD = 1024  # characters at the start of an object in which its name is sought
MALFORMED, TOO_LARGE = REASONS = ("malformed", "size")


class NotJson(Exception):
    """The whole answer is not JSON of an API server."""


class _Incomplete(Exception):
    """The value is not complete yet."""


class Odd(Exception):
    """An object that must be omitted; raised by `keep`. `reason`: one of REASONS."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Undecoded(Odd):
    """A value cannot be decoded. The reader has not skipped it yet."""


class ListReader(Generic[T]):
    """Reads one answer. Iteration yields the result of `keep` for each item. Afterwards `token` is the token of the
    next page, or "" after the last page.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        keep: Callable[[Any], T],
        report: Callable[[str, str, str], None],
        one_at_a_time: AbstractContextManager[Any],
    ) -> None:
        """`report`: called for every omitted object, with its name ("" if unknown), one of REASONS, and a text.

        `one_at_a_time`: a lock that the reader holds while an object is in memory, so that only one thread decodes at a
        time.
        """
        self._chunks = chunks
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._keep = keep
        self._report = report
        self._one_at_a_time = one_at_a_time
        self._text = ""
        self._at = 0
        self._head = ""  # the beginning of the value that was decoded last
        self._is_over = False
        self.token = ""

    def __iter__(self) -> Iterator[T]:
        """Yields the result of `keep` for each item. Raises NotJson, and each error of the iteration over chunks."""
        is_list = False
        for key in self._keys():
            if key == "items" and self._peek() == "[":
                is_list = True
                yield from self._items()
            elif key == "items":
                is_list = self._value() is None
            elif key == "metadata":
                metadata = self._value()
                token = metadata.get("continue") if isinstance(metadata, dict) else None
                self.token = token if isinstance(token, str) else ""
            else:
                self._value()
        if not is_list:
            raise NotJson("`items` is missing")

    def metadata(self) -> dict[str, Any]:
        """Returns the `metadata` of a single object, without values that cannot be decoded. Raises NotJson.

        Reads nothing after the metadata.
        """
        for key in self._keys():
            if key == "metadata":
                return {name: value for name in self._keys() if (value := self._value_or_skip()) is not None}
            self._value_or_skip()
        raise NotJson("it has no metadata")

    def _keys(self) -> Iterator[str]:
        """Yields the keys of an object. The caller must read each value before it takes the next. Raises NotJson."""
        self._expect("{")
        more = self._peek() != "}"
        if not more:
            self._expect("}")
        while more:
            key = self._value()
            if not isinstance(key, str):
                raise NotJson("a key is not a string")
            self._expect(":")
            yield key
            more = self._follows("}")

    def _value_or_skip(self) -> Any:
        """Returns the next value, or skips a value that cannot be decoded and returns None. Raises NotJson."""
        while True:
            try:
                return self._decoded()
            except _Incomplete:
                self._read_on()
            except _Undecoded:
                self._skip()
                return None

    def _items(self) -> Iterator[T]:
        self._expect("[")
        more = self._peek() != "]"
        if not more:
            self._expect("]")
        while more:
            try:
                kept = self._one()
            except _Undecoded as exc:
                self._skip()
                self._report(_name_in(self._head), exc.reason, str(exc))
            except Odd as exc:
                self._report(_name_in(self._head), exc.reason, str(exc))
            else:
                yield kept
            more = self._follows("]")

    def _one(self) -> T:
        """Decodes one object and returns the result of `keep`. Raises Odd, _Undecoded."""
        while True:
            with self._one_at_a_time:  # not held while more text is read, which waits for the server
                try:
                    found = self._decoded()
                    return self._keep(found)
                except _Incomplete:
                    pass
                except (Odd, _Undecoded, NotJson):
                    raise
                except Exception as exc:  # one odd object must not affect others
                    raise Odd(MALFORMED, f"it cannot be parsed ({type(exc).__name__})") from exc
            self._read_on()

    def _value(self) -> Any:
        """Returns the next value. Raises NotJson."""
        while True:
            try:
                return self._decoded()
            except _Undecoded as exc:
                raise NotJson(str(exc)) from exc
            except _Incomplete:
                self._read_on()

    def _decoded(self) -> Any:
        """Returns the next value, if complete. Otherwise raises _Incomplete or _Undecoded, at the same position."""
        self._peek()
        self._head = self._text[self._at : self._at + HEAD]
        try:
            value, end = DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as exc:
            if len(self._text) - self._at > OBJECT_MAX:
                raise _Undecoded(TOO_LARGE, f"it is longer than {OBJECT_MAX // 2**20} MiB") from exc
            if self._is_over:
                raise _Undecoded(MALFORMED, "it is not JSON") from exc
            raise _Incomplete from exc
        except RecursionError as exc:
            raise _Undecoded(MALFORMED, "it is nested too deeply") from exc
        except ValueError as exc:  # a number with more digits than Python parses
            raise _Undecoded(MALFORMED, "a number in it is too long") from exc
        if end - self._at > OBJECT_MAX:
            raise _Undecoded(TOO_LARGE, f"it is longer than {OBJECT_MAX // 2**20} MiB")
        # The rest of a number may be missing until another character follows.
        if not isinstance(value, dict | list | str) and self._text[end : end + 1] not in FOLLOWS and not self._is_over:
            raise _Incomplete
        self._at = end
        return value

    def _read_on(self) -> None:
        """Reads more until the text of the value has doubled, so that a long value is decoded only a few times."""
        length = len(self._text) - self._at
        self._is_over = not self._more(min(length, OBJECT_MAX + 1 - length))

    def _skip(self) -> None:
        """Skips a string, or an object or list by its brackets. Raises NotJson."""
        if self._peek() == '"':
            self._at += 1
            self._skip_text()
            return
        if self._text[self._at] not in "{[":
            raise NotJson("a value is not an object, a list or a string")
        depth = 0
        while True:
            match = BRACKETS.search(self._text, self._at)
            if match is None:
                self._at = len(self._text)
                self._need_more()
                continue
            self._at = match.end()
            if match[0] == '"':
                self._skip_text()
                continue
            depth += 1 if match[0] in "{[" else -1
            if depth <= 0:
                return

    def _skip_text(self) -> None:
        """Skips the rest of a string, up to the first quote that is not escaped."""
        is_escaped = False  # whether the next character is escaped
        while True:
            part = self._text[self._at :]
            if is_escaped and part:
                part = "." + part[1:]
            plain = part.replace("\\\\", "..").replace('\\"', "..")  # in C, and of the same length
            quote = plain.find('"')
            if quote >= 0:
                self._at += quote + 1
                return
            is_escaped = plain.endswith("\\")
            self._at = len(self._text)
            self._need_more()

    def _need_more(self) -> None:
        if not self._more(1):
            raise NotJson("it ends too early")

    def _peek(self) -> str:
        """Returns the next character that is not white space. Moves the position to this character."""
        while (match := NOT_SPACE.search(self._text, self._at)) is None:
            self._at = len(self._text)
            self._need_more()
        self._at = match.start()
        return match[0]

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise NotJson(f"expected {character!r}, found {self._text[self._at]!r}")
        self._at += 1

    def _follows(self, end: str) -> bool:
        """Returns whether another element follows. Consumes the `,` before it, or the closing bracket `end`."""
        if self._peek() == end:
            self._at += 1
            return False
        self._expect(",")
        return True

    def _more(self, least: int) -> bool:
        """Reads at least `least` more characters, and drops the text before the position. Returns False if nothing was
        read.
        """
        parts = [self._text[self._at :]]
        self._text, self._at = "", 0
        length = 0
        for chunk in self._chunks:
            parts.append(self._decode(chunk))
            length += len(parts[-1])
            if length >= least:
                break
        self._text = "".join(parts)
        return length > 0


def _name_in(head: str) -> str:
    """NAMESPACE/NAME of an object from its first characters; "" if they do not contain it."""
    match = NAMED.match(head)
    return "/".join(part for part in (match[2], match[1]) if part) if match is not None else ""
