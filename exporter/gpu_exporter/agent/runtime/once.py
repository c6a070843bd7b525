"""Runs `--once`: prints one output and returns an exit code.

Shell prompts and cron jobs wait for the output, so `--once` loads no module that only the daemon needs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.exposition.checks import OF_DEVICES, FailedCheck, join_failed
from gpu_exporter.agent.exposition.health import (
    NONE_ANSWER,
    UNCHECKED,
    judge_health,
    list_failed_checks,
    list_gaps,
    list_unchecked,
)
from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.files import write_atomically
from gpu_exporter.common.model.views import AgentStatus, View
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.threads import start
from gpu_exporter.common.version import VERSION

GAPS_MAX = 8  # most gaps to print at the prompt
ANSWER_MAX = 64 * 2**20  # bytes; the largest page of a node has about 2 MiB
ANSWER_S = 10.0
OLD_S = 180.0  # as WatchdogSec of the systemd unit
EXITS = {"ok": Exit.DONE, "none_expected": Exit.DONE, "partial": Exit.PARTIAL, "no_data": Exit.NO_DATA}
PATHS = {  # no flag of the daemon changes these paths
    "prometheus": "/api/v1/metrics",
    "openmetrics": "/api/v1/metrics",
    "json": "/api/v1/status",
    "table": "/api/v1/table",
    "holders": "/api/v1/holders",
}

ACCEPT = {"openmetrics": "Accept: application/openmetrics-text\r\n"}


def render(view: View, form: str) -> str:
    """Returns the view in one of the formats of PATHS. Loads only the modules that this format needs."""
    if form == "json":
        from gpu_exporter.agent.exposition.json_format import render_json

        return render_json(view) + "\n"
    if form == "table":
        from gpu_exporter.agent.exposition.table import render_table

        return render_table(view)
    if form == "holders":
        from gpu_exporter.agent.exposition.holders import render_holders

        return render_holders(view)
    from gpu_exporter.agent.exposition.series import list_series
    from gpu_exporter.agent.exposition.text import TextRenderer

    return TextRenderer().render(list_series(view), openmetrics=form == "openmetrics")


class DaemonUnreadable(ForeignError):
    """A daemon runs on this node, but does not answer this process. The text contains the reason and the remedy."""


def read_from_daemon(socket_path: Path, form: str, timeout_s: float) -> str | None:
    """Returns the output of the daemon on this node, which has data of more than one cycle. None if no daemon runs.

    Raises DaemonUnreadable.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(timeout_s)
            stream.connect(str(socket_path))
            stream.sendall(
                f"GET {PATHS[form]} HTTP/1.1\r\n{ACCEPT.get(form, '')}Host: local\r\nConnection: close\r\n\r\n".encode()
            )
            answer, until = bytearray(), time.monotonic() + ANSWER_S
            while data := stream.recv(65536):
                answer += data
                if len(answer) > ANSWER_MAX or time.monotonic() > until:
                    raise OSError(f"the answer is over {ANSWER_MAX // 2**20} MiB or took over {ANSWER_S:g} s")
    except (FileNotFoundError, ConnectionRefusedError):  # no daemon runs here, or the daemon was killed
        return None
    except PermissionError as exc:
        raise DaemonUnreadable(
            f"{socket_path}: not readable as uid {os.geteuid()}{_group_of(socket_path)}; join its group, or start the "
            "daemon with --web.socket-mode=0666"
        ) from exc
    except OSError as exc:
        raise DaemonUnreadable(f"{socket_path}: cannot read the daemon's answer in {timeout_s:g} s: {exc}") from exc
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        line = head.partition(b"\r\n")[0].decode("utf-8", "replace")
        raise DaemonUnreadable(f"{socket_path}: unexpected answer of the daemon: {line!r}")
    return body.decode("utf-8", "replace")


def _group_of(socket_path: Path) -> str:
    """Returns `, only for group NAME`, or "" if the group cannot be read."""
    try:
        return f", only for group {socket_path.group()}"
    except (OSError, KeyError):  # a parent folder is closed too, or the group has no name
        return ""


def run_once(
    take_view: Callable[[], View],
    form: str,
    output: Path | None,
    timeout_s: float,
    socket_path: Path | None,
    backend_name: str,
    checks: Collection[str] | None = None,
) -> int:
    """Prints or writes one output. Returns the exit code.

    `checks`: only these checks of GPUs set the exit code. None: all checks and the sources of holders set it.
    """
    if socket_path is not None:
        try:
            body = read_from_daemon(socket_path, form, min(2.0, timeout_s))
            status = read_from_daemon(socket_path, "json", min(2.0, timeout_s))
        except DaemonUnreadable as exc:
            _say(f"{exc}; showing a single reading without history")
        else:
            if body is not None and status is not None:
                found = _read_conclusion(status, devices_only=checks is not None)
                # If a health check asks an exporter of another version, this process reads the GPUs, so that an
                # upgrade fails no node.
                if found is not None or checks is None:
                    _deliver(body, output)
                    return Exit.PARTIAL if found is None else _conclude(found, checks)
    result: list[View | Exception] = []

    def work() -> None:
        try:
            result.append(take_view())
        except Exception as exc:  # passed to the waiting thread, which reports it
            result.append(exc)

    worker = threading.Thread(target=work, name="once", daemon=True)
    start(worker)
    # While this thread waits for the driver, an empty view loads the modules that the real view will need.
    render(View(0.0, AgentStatus(VERSION, backend_name, False, "", 0, 0, 0.0, None), (), ()), form)
    worker.join(timeout_s)
    if not result:
        return _fail(f"the driver did not answer within {timeout_s:g} s", form, output, backend_name, checks)
    view = result[0]
    if isinstance(view, DriverUnavailable):
        return _fail(str(view), form, output, backend_name, checks)
    if isinstance(view, Exception):
        raise view
    _deliver(render(view, form), output)
    reason = view.status.driver_error or "the driver lists no GPU that answers"
    failed, gaps = list_failed_checks(view), list_gaps(view)
    health = judge_health(view, devices_only=checks is not None)
    return _conclude(Conclusion(health, reason, view.status.warnings, gaps, failed, list_unchecked(view)), checks)


class Conclusion(NamedTuple):
    """The result of a view for the exit code.

    - `health`: as from judge_health; only of the GPUs if checks were chosen. `reason`: why no GPU answers.
    - `gaps`: texts about missing parts. `unchecked`: checks that could not be made.
    """

    health: str
    reason: str
    warnings: Sequence[str] = ()
    gaps: Sequence[str] = ()
    failed: Sequence[FailedCheck] = ()
    unchecked: Sequence[str] = ()


def _read_conclusion(status: str, *, devices_only: bool) -> Conclusion | None:
    """Reads the JSON status of a running exporter. Prints a message and returns None if the exporter has another
    version, or has published nothing for a while.
    """
    try:
        data = json.loads(status)
        age_s = time.time() - data["timestamp_seconds"]
        if age_s > OLD_S:
            _say(f"the running exporter has published nothing for {age_s:.0f} s: restart the exporter")
            return None
        found = Conclusion(
            data["devices_health" if devices_only else "health"],
            data.get("driver_error") or "no GPU answers",
            data.get("warnings") or (),
            list(map(str, data["gaps"])),
            [FailedCheck(*(str(each[name]) for name in FailedCheck._fields)) for each in data["failed_checks"]],
            [name for name in UNCHECKED if name in data["unchecked"]],
        )
        if found.health in EXITS:
            return found
    except (ValueError, AttributeError, RecursionError, KeyError, TypeError):
        pass
    _say(
        "the running exporter is of another version, and does not report whether all GPUs answer: restart the exporter"
    )
    return None


def _conclude(found: Conclusion, checks: Collection[str] | None) -> int:
    """Prints the warnings and the problem for the user. Returns the exit code."""
    health, gaps = found.health, found.gaps
    for warning in found.warnings:
        _say(f"warning: {warning}")
    failed = [each for each in found.failed if checks is None or each.check in checks]
    if checks is not None and health == "partial":
        gaps = [each.text for each in failed]
        health = "partial" if failed else "ok"
    if health == "no_data":
        counts = [gap for gap in gaps if gap.endswith(NONE_ANSWER)]
        _say(f"no GPU data: {'; '.join((found.reason, *counts))}")
        if all(each.check != "lost" for each in failed):
            failed = [FailedCheck("lost", found.reason, "check the driver"), *failed]
    elif health == "none_expected":
        _say(f"no GPU is expected here: {found.reason}")
    elif health == "partial":
        for gap in gaps[:GAPS_MAX]:
            _say(f"partial: {gap}")
        if len(gaps) > GAPS_MAX:
            _say(f"partial: {len(gaps) - GAPS_MAX} more; --format=json names all of them")
    if checks is not None and health in ("partial", "no_data"):
        _say(f"failed checks: {join_failed(failed)}")
    for name in found.unchecked if health in ("ok", "partial") else ():
        if checks is not None and checks != OF_DEVICES and name in checks:
            _say(f"warning: check {name} was not made: {UNCHECKED[name]}")
    return EXITS[health]


def _say(line: str) -> None:
    print(f"gpu-exporter: {one_line(line)}", file=sys.stderr)  # noqa: T201 - for the user at the prompt


def _deliver(body: str, output: Path | None) -> None:
    if output is not None:
        write_atomically(output, body.encode("utf-8", "replace"))
        return
    sys.stdout.write(body)
    sys.stdout.flush()  # before the lines on standard error that belong to it


def _fail(reason: str, form: str, output: Path | None, backend_name: str, checks: Collection[str] | None) -> int:
    """Prints the error in one line. Writes it to a textfile too, so that the old values do not remain there. Returns
    the exit code.
    """
    if output is not None:
        status = AgentStatus(VERSION, backend_name, False, reason, 0, 0, 0.0, None, driver_missed=True)
        write_atomically(output, render(View(0.0, status, (), ()), form).encode())
    return _conclude(Conclusion("no_data", reason), checks)
