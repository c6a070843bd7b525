"""XIDs are counted for every GPU that can report them, also after a failed registration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_exporter.agent.collectors.xid import classify
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import XidEvent
from gpu_exporter.agent.sampling import events
from gpu_exporter.agent.sampling.events import MAX_CODES, EventLoop, XidBook
from gpu_exporter.agent.sampling.manager import DeviceManager
from gpu_exporter.common.clock import ManualClock, SystemClock
from gpu_exporter.common.model.readings import XID_CLASSES


class WitnessPeriod:
    """A registration with scripted events, and then no more events."""

    def __init__(self, covered: set[str], *, complete: bool = True, script: list[XidEvent | Exception] | None = None):
        self.covered = frozenset(covered)
        self.complete = complete
        self._script = script or []

    def wait(self, timeout_s: float) -> XidEvent | None:
        if self._script:
            step = self._script.pop(0)
            if isinstance(step, Exception):
                raise step
            return step
        threading.Event().wait(0.01)
        return None

    def close(self) -> None:
        return


def run(opens: list[WitnessPeriod | Exception], book: XidBook, until: threading.Event) -> EventLoop:
    """Run a loop over these registrations in turn, until it is asked to stop."""

    def open_watch() -> WitnessPeriod:
        step = opens.pop(0) if len(opens) > 1 else opens[0]
        if isinstance(step, Exception):
            raise step
        return step

    loop = EventLoop(open_watch, book, SystemClock(), lambda: None)
    loop.start()
    assert until.wait(60.0)
    loop.ask_to_stop()
    assert loop.join(60.0)
    return loop


class Counted(XidBook):
    """Sets `enough` after `number` events were counted."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.enough = threading.Event()
        self._left = number

    def count(self, event: XidEvent, wall: float, monotonic: float) -> None:
        super().count(event, wall, monotonic)
        self._left -= 1
        if not self._left:
            self.enough.set()


@pytest.mark.parametrize(
    "first",
    [
        lambda: DeviceError("nvmlEventSetCreate", "NVML_ERROR_UNKNOWN"),
        lambda: WitnessPeriod({"GPU-0"}, complete=False),
        lambda: WitnessPeriod({"GPU-0"}, script=[DeviceError("nvmlEventSetWait_v2", "NVML_ERROR_GPU_IS_LOST")]),
        lambda: WitnessPeriod({"GPU-0"}, script=[ValueError("a bug in the exporter")]),
    ],
    ids=["cannot register", "one GPU is left out", "the wait fails", "a bug in the exporter"],
)
def test_a_failed_registration_for_events_is_retried(
    first: Callable[[], WitnessPeriod | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.02)
    book = Counted(1)
    loop = run([first(), WitnessPeriod({"GPU-0", "GPU-1"}, script=[XidEvent("GPU-1", 79)])], book, book.enough)
    assert loop.outcome is not None
    assert loop.outcome.success
    counts = book.counts("GPU-1")
    assert counts is not None
    assert [code[:3] for code in counts.codes] == [(79, "hardware", 1)]


def test_without_a_gpu_that_answers_the_error_names_no_driver_call(caplog: pytest.LogCaptureFixture) -> None:
    until = threading.Event()

    class NoDevices(DeviceManager):
        """A manager whose driver lists no GPU that answers."""

        def __init__(self) -> None:
            pass

        def _devices(self) -> list[Any]:
            until.set()
            return []

    loop = EventLoop(NoDevices()._open_watch, XidBook(), SystemClock(), lambda: None)
    loop.start()
    assert until.wait(60.0)
    loop.ask_to_stop()
    assert loop.join(60.0)
    why = "no GPU answers, so the exporter cannot register for XID events"
    assert caplog.messages == [f"XIDs are not counted until a retry succeeds: {why}"]
    assert loop.outcome is not None
    assert (loop.outcome.success, loop.outcome.error) == (False, why)


def test_events_queued_at_the_end_of_a_registration_are_counted() -> None:
    """A GPU is lost and a new registration follows: the XIDs of the loss must not be dropped with the old one."""
    book = Counted(1)
    many = [XidEvent("GPU-0", xid) for xid in (79, 45, 46, 47)]
    watch = WitnessPeriod({"GPU-0"}, script=list(many))
    loop = EventLoop(lambda: watch, book, SystemClock(), lambda: None)
    original = watch.wait

    def wait_and_end(timeout_s: float) -> XidEvent | None:
        loop.ask_to_stop()  # the stop is requested while the first event is delivered
        return original(timeout_s)

    watch.wait = wait_and_end  # type: ignore[method-assign]
    loop.start()
    assert loop.join(60.0)
    counts = book.counts("GPU-0")
    assert counts is not None
    assert [code[0] for code in counts.codes] == [45, 46, 47, 79]


def test_a_flood_of_one_xid_is_logged_once_a_minute_with_the_number_of_repeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thousand events in 2.5 minutes of the clock; one has another code, and one another GPU."""
    clock, book = ManualClock(), XidBook()
    script = [XidEvent("GPU-0", 31)] * 1000
    script[500:502] = [XidEvent("GPU-0", 79), XidEvent("GPU-1", 31)]
    watch = WitnessPeriod({"GPU-0", "GPU-1"}, script=[])
    loop = EventLoop(lambda: watch, book, clock, lambda: None)

    def wait(timeout_s: float) -> XidEvent | None:
        clock.advance(0.15)
        if not script:
            loop.ask_to_stop()
            return None
        return script.pop(0)

    watch.wait = wait  # type: ignore[method-assign]
    loop.start()
    assert loop.join(60.0)
    counts = book.counts("GPU-0")
    assert counts is not None
    assert [code[:3] for code in counts.codes] == [(31, "application", 998), (79, "hardware", 1)]
    assert [record.getMessage() for record in caplog.records] == [
        "gpu GPU-0: XID 31 (application)",
        "gpu GPU-0: XID 31 (application), 400 times since this was last logged",
        "gpu GPU-0: XID 79 (hardware)",
        "gpu GPU-1: XID 31 (application)",
        "gpu GPU-0: XID 31 (application), 398 times since this was last logged",
    ]


def test_a_host_without_xid_events_is_no_error() -> None:
    book = XidBook()
    loop = EventLoop(
        lambda: (_ for _ in ()).throw(NotSupported("nvmlEventSetCreate", "x")), book, SystemClock(), lambda: None
    )
    loop.start()
    assert loop.join(60.0)
    assert loop.outcome is not None
    assert loop.outcome.success
    assert book.counts("GPU-0") is None  # not 0: no thread receives events


def test_xid_codes_are_counted_by_class_from_zero_with_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    book = XidBook()
    book.watch("GPU-0")
    counts = book.counts("GPU-0")
    assert counts is not None
    assert counts.codes == ()
    for xid in (31, 31, 79, *range(1000, 1000 + 2 * MAX_CODES)):
        book.count(XidEvent("GPU-0", xid), 5.0, 1.0)
    counts = book.counts("GPU-0")
    assert counts is not None
    assert counts.codes[:2] == ((31, "application", 2, 5.0), (79, "hardware", 1, 5.0))
    assert len(counts.codes) == MAX_CODES
    assert caplog.text.count("is not counted") == 1


@pytest.mark.parametrize(
    ("kind", "xids"),
    [
        ("application", (13, 31, 39, 43, 82, 86, 94, 96, 105, 126, 130, 135, 139)),
        ("information", (63, 92, 145, 154, 162)),
        ("hardware", (48, 62, 64, 79, 81, 87, 95, 109, 119, 136, 140, 157, 161, 163, 999)),
    ],
)
def test_each_xid_code_has_one_of_three_classes(kind: str, xids: tuple[int, ...]) -> None:
    assert {xid: classify(xid) for xid in xids} == dict.fromkeys(xids, kind)
    assert kind in XID_CLASSES
