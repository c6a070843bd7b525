"""Debian's chromium, driven over the pipes of its DevTools protocol: https://chromedevtools.github.io/devtools-protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

ANSWER_S = 30.0


class Browser:
    """One page of a headless browser."""

    def __init__(self, to: int, answers: BinaryIO) -> None:
        self._to = to
        self._answers = answers
        self._last = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer; events before it are dropped."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer}"
                return dict(answer["result"])

    def _read(self) -> bytes:
        text = bytearray()
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            text += byte
        assert text, "the browser has ended"
        return bytes(text)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str, *, script: bool = True) -> None:
        """Open the page and wait until it is complete; `script`: false is JavaScript switched off."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until the expression is true."""
        until = time.monotonic() + ANSWER_S
        while not self.ask(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser. Without chromium the test is skipped; in CI it fails."""
    if shutil.which("chromium") is None:
        reason = "chromium is not on PATH: install with `make testbed` (needs root and Debian)"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    read_by_it, to = os.pipe()
    answers, written_by_it = os.pipe()

    def as_it_wants() -> None:
        """Prepare the file descriptors: chromium reads 3 and writes 4."""
        os.dup2(os.dup(read_by_it), 3)
        os.dup2(os.dup(written_by_it), 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    process = subprocess.Popen(
        ["chromium", *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=as_it_wants,  # no thread of the tests holds a lock here
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        with os.fdopen(answers, "rb") as stream:
            yield Browser(to, stream)
    finally:
        os.close(to)
        process.terminate()
        process.wait(20)
