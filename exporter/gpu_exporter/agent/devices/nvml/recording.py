"""Records all answers of a driver in a file, e.g. for a bug report, and replays such a file.

A recording has every answer of every call with its time and latency, in NVML's own units. The file is gzipped, with one
JSON document per line: first the header, then one line for each question (call, device, arguments). The recording
contains no names of processes, users or hosts. UUIDs are kept or, on request, replaced by hashes with a salt that is
not stored.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import json
import secrets
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.devices.errors import DeviceError, DriverUnavailable, NotSupported, device_error
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Handle, Library
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.files import open_named, read_gzip

FORMAT, VERSION = "gpu-exporter-recording", 1
FIELDS, SAMPLES, GPM = "nvmlDeviceGetFieldValues", "nvmlDeviceGetSamples", "nvmlGpmMetricsGet"
UTILIZATIONS = "nvmlDeviceGetProcessUtilization"
WAIT, FREE = "nvmlEventSetWait_v2", "nvmlGpmSampleFree"
Question = tuple[str, str, tuple[Any, ...]]  # call, place of the device, arguments that distinguish questions
RECORDING_MAX = 256 * 2**20  # bytes of text: a node of 8 GPUs for a day


class RecordingError(ValueError):
    """The file is not a recording. The text contains the file, the line and the error."""


@dataclass(slots=True)
class Answers:
    """All answers to one question (call, device, arguments), sorted by time.

    `values`: the distinct answers, as ["ok", answer] or ["error", name].
    """

    times_s: list[float] = field(default_factory=list)
    latencies_us: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def add(self, time_s: float, latency_us: int, value: list[Any]) -> None:
        key = json.dumps(value)
        if key not in self._index:
            self._index[key] = len(self.values)
            self.values.append(value)
        self.times_s.append(round(time_s, 4))
        self.latencies_us.append(latency_us)
        self.chosen.append(self._index[key])

    def at(self, time_s: float) -> list[Any]:
        """Returns the last answer at or before `time_s`, otherwise the first answer."""
        return self.values[self.chosen[max(0, bisect.bisect_right(self.times_s, time_s) - 1)]]


class Recorder:
    """A library that records the answers of another library. Thread-safe."""

    def __init__(self, library: Library, *, hashed: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._library = library
        self._clock = clock
        self._start = clock()
        self._wall = time.time()
        self._salt = secrets.token_bytes(16) if hashed else None
        self._lock = threading.Lock()
        self.answers: dict[Question, Answers] = {}

    def open(self) -> None:
        self._library.open()

    def close(self) -> None:
        self._library.close()

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        begin = self._clock()
        try:
            answer = self._library.ask(call, handle, *arguments)
        except DeviceError as exc:
            for question in _questions(call, handle, arguments):
                self._note(question, begin, ["error", exc.error])
            raise
        if call != FREE:
            parts = answer if call == FIELDS else (answer,)
            for question, part in zip(_questions(call, handle, arguments), parts, strict=True):
                self._note(question, begin, ["ok", self._hide(call, part)])
        return answer

    def _note(self, question: Question, begin: float, value: list[Any]) -> None:
        latency = round((self._clock() - begin) * 1e6)
        with self._lock:
            answers = self.answers.setdefault(question, Answers())
            answers.add(begin - self._start, latency, value)

    def _hide(self, call: str, answer: Any) -> Any:
        if call == "nvmlDeviceGetUUID" and self._salt is not None:
            kind = answer.partition("-")[0]
            digest = hashlib.sha256(self._salt + answer.encode()).hexdigest()
            return f"{kind}-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        if ("RunningProcesses" in call or call == UTILIZATIONS) and not isinstance(answer, int):
            return len(answer)  # pids stay private: a replay needs only their number
        return answer.name if isinstance(answer, Handle) else answer

    def render(self, **about: str) -> bytes:
        """Returns the recording as the content of a file. `about` is added to the header."""
        with self._lock:
            header = {
                "format": FORMAT,
                "version": VERSION,
                "wall": round(self._wall, 3),
                "duration_s": round(self._clock() - self._start, 3),
                "hashed": self._salt is not None,
                **about,
            }
            lines = [header]
            lines += [
                {
                    "call": call,
                    "device": place,
                    "arguments": arguments,
                    "s": entry.times_s,
                    "us": entry.latencies_us,
                    "answer": entry.chosen,
                    "answers": entry.values,
                }
                for (call, place, arguments), entry in sorted(self.answers.items(), key=lambda item: str(item[0]))
            ]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        # The gzip header has no time, so the same recording always gives the same file.
        return gzip.compress(text.encode(), 9, mtime=0)


def _questions(call: str, handle: Handle, arguments: tuple[Any, ...]) -> Iterator[Question]:
    """Yields the questions in a call, without arguments that differ at each call (stamps, window names, handles)."""
    if call == FIELDS:
        for identifier in arguments[0]:
            yield call, handle.name, tuple(identifier)
    elif call == GPM:
        yield call, handle.name, (arguments[1],)
    elif call == SAMPLES:
        yield call, handle.name, (arguments[0],)
    elif call == UTILIZATIONS:
        yield call, handle.name, ()  # the stamp differs in every call
    elif call == WAIT:
        yield call, "", ()
    elif call != FREE:
        yield call, handle.name, tuple(a for a in arguments if not isinstance(a, Handle))


class CallSummary(NamedTuple):
    """Statistics of one driver call: number of calls, median and 99th percentile of the duration (us), errors."""

    call: str
    times: int
    p50_us: float
    p99_us: float
    refused: list[str]


def summarize(answers: Mapping[Question, Answers]) -> list[CallSummary]:
    """Returns one summary for each call, sorted by name."""
    calls: dict[str, tuple[list[int], set[str]]] = {}
    for (call, _, arguments), entry in answers.items():
        name = f"{call} {arguments[0]}" if call in (FIELDS, SAMPLES) else call
        latencies, errors = calls.setdefault(name, ([], set()))
        latencies += entry.latencies_us
        errors.update(value for kind, value in entry.values if kind == "error")
        if call == FIELDS:
            errors.update(f"code {value[0]}" for kind, value in entry.values if kind == "ok" and value[0])
    rows = []
    for name, (latencies, errors) in sorted(calls.items()):
        latencies.sort()
        p50, p99 = statistics.median(latencies), latencies[int(0.99 * len(latencies))]
        rows.append(CallSummary(name, len(latencies), p50, p99, sorted(errors)))
    return rows


class RecordedLibrary:
    """Replays a recording in real time, starting at the first call, without repetition.

    After the end of the recording, every call raises NotSupported.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.wall = 0.0
        """Unix seconds at which the recording began, after `open`."""
        self.duration_s = 0.0
        self._path = path
        self._clock = clock
        self._start: float | None = None
        self._answers: dict[Question, Answers] = {}
        self._given: dict[Question, int] = {}

    def open(self) -> None:
        if self._answers:
            return
        try:
            self.wall, self.duration_s, self._answers = read_recording(self._path)
        except (OSError, RecordingError) as exc:
            raise DriverUnavailable(str(exc)) from exc

    def close(self) -> None:
        return

    def cycles(self, handle: Handle) -> list[float]:
        """The seconds after the start at which a GPU was read, one for each cycle. Empty if it never was."""
        answers = self._answers.get(("nvmlDeviceGetUtilizationRates", handle.name, ()))
        return answers.times_s if answers is not None else []

    def _now(self) -> float:
        if self._start is None:
            self._start = self._clock.monotonic()
        return self._clock.monotonic() - self._start

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        if call == FREE:
            return None
        if call == WAIT:
            return self._wait(*arguments)
        now = self._now()
        questions = list(_questions(call, handle, arguments))
        if call == SAMPLES:
            return self._samples(questions[0], now, arguments[1])
        if call == GPM:
            return self._once(questions[0], now)
        if call == FIELDS:
            return tuple(self._field(question, now) for question in questions)
        answer = self._answer(questions[0], now)
        if call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlEventSetCreate"):
            return Handle(answer)
        return answer

    def _answer(self, question: Question, now: float) -> Any:
        kind, value = self._find(question, now).at(now)
        if kind == "error":
            raise device_error(question[0], value)
        return value

    def _find(self, question: Question, now: float) -> Answers:
        answers = self._answers.get(question)
        if answers is None:
            raise NotSupported(question[0], "NVML_ERROR_FUNCTION_NOT_FOUND")
        if now > self.duration_s:
            raise NotSupported(question[0], "NVML_ERROR_NO_DATA")
        return answers

    def _field(self, question: Question, now: float) -> tuple[int, float]:
        if question not in self._answers:
            return nvml.NVML_ERROR_FUNCTION_NOT_FOUND, 0
        code, value = self._answer(question, now)
        return code, value

    def _samples(self, question: Question, now: float, since_us: int) -> tuple[tuple[int, float], ...]:
        """Returns the entries of the sample ring until now. Converts their stamps to the time of this clock."""
        answers = self._find(question, now)
        shift_us = round((self._clock.wall() - now - self.wall) * 1e6)
        entries: set[tuple[int, float]] = set()
        for time_s, chosen in zip(answers.times_s, answers.chosen, strict=True):
            kind, value = answers.values[chosen]
            if time_s > now:
                break
            if kind == "ok":
                entries.update((stamp + shift_us, number) for stamp, number in value)
        if answers.at(now)[0] == "error":
            self._answer(question, now)
        return tuple(sorted(entry for entry in entries if entry[0] > since_us))

    def _once(self, question: Question, now: float) -> Any:
        """Returns the newest answer, or None if it was returned before: each answer covers its own period."""
        answers = self._find(question, now)
        newest = bisect.bisect_right(answers.times_s, now) - 1
        if newest <= self._given.get(question, -1):
            return None
        self._given[question] = newest
        return self._answer(question, now)

    def _wait(self, timeout_ms: int) -> Any:
        question: Question = (WAIT, "", ())
        self._clock.wait(threading.Event(), timeout_ms / 1e3)
        answers, now = self._answers.get(question, Answers()), self._now()
        for position in range(self._given.get(question, -1) + 1, bisect.bisect_right(answers.times_s, now)):
            self._given[question] = position
            kind, value = answers.values[answers.chosen[position]]
            if kind == "ok" and value is not None:
                return value
        return None


def read_recording(path: Path) -> tuple[float, float, dict[Question, Answers]]:
    """Reads a recording. Returns the wall time of its start, its length in seconds, and the answers.

    Raises RecordingError, OSError.
    """
    try:
        lines = read_gzip(path, RECORDING_MAX).decode().splitlines()
    except (gzip.BadGzipFile, EOFError, ValueError) as exc:
        raise RecordingError(f"{path}: not a gzipped recording: {exc}") from exc
    number = 1
    try:
        header = json.loads(lines[0]) if lines else {}
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise RecordingError(f"{path}:1: not a recording of gpu-exporter")
        if header.get("version") != VERSION:
            raise RecordingError(
                f"{path}:1: the recording has version {header.get('version')!r}; this release reads version {VERSION}: "
                "record again with this release"
            )
        wall, duration_s = float(header["wall"]), float(header["duration_s"])
        answers: dict[Question, Answers] = {}
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 -- an error names the line
            entry = json.loads(line)
            question = (str(entry["call"]), str(entry["device"]), _frozen(entry["arguments"]))
            if not len(entry["s"]) == len(entry["us"]) == len(entry["answer"]) > 0:
                raise ValueError("the numbers of times and answers differ")
            if not all(0 <= chosen < len(entry["answers"]) for chosen in entry["answer"]):
                raise ValueError("an answer is missing")
            answers[question] = Answers(
                [float(s) for s in entry["s"]], entry["us"], entry["answer"], [_value(v) for v in entry["answers"]]
            )
        return wall, duration_s, answers
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as exc:
        if isinstance(exc, RecordingError):
            raise
        raise RecordingError(
            f"{path}:{number}: the line is malformed ({type(exc).__name__}: {exc}): record again"
        ) from exc


def _frozen(value: Any) -> Any:
    """Converts nested lists to nested tuples, as the live library returns them."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _value(value: Any) -> list[Any]:
    kind, answer = value
    if kind not in ("ok", "error"):
        raise ValueError(f"{kind!r} is neither ok nor error")
    return [kind, _frozen(answer)]


def is_recording(path: Path) -> bool:
    """Returns whether the file begins like a recording of this exporter. False for a log of nvidia-smi."""
    try:
        with open_named(path) as packed, gzip.open(packed) as file:
            return FORMAT.encode() in file.readline(4096)
    except (OSError, EOFError, zlib.error):
        return False
