"""Runs `--once`: prints one output and returns an exit code.

Shell prompts and cron jobs wait for it, so it loads no module that only the daemon needs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.exposition.health import judge_health, list_gaps
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
    *,
    devices_only: bool = False,
) -> int:
    """Prints or writes one output. Returns the exit code.

    `devices_only`: the sources of holders do not affect the exit code.
    """
    if socket_path is not None:
        try:
            body = read_from_daemon(socket_path, form, min(2.0, timeout_s))
            status = read_from_daemon(socket_path, "json", min(2.0, timeout_s))
        except DaemonUnreadable as exc:
            _say(f"{exc}; showing a single reading without history")
        else:
            if body is not None and status is not None:
                _deliver(body, output)
                return _conclude_of_daemon(status, devices_only=devices_only)
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
        return _fail(f"the driver did not answer within {timeout_s:g} s", form, output, backend_name)
    view = result[0]
    if isinstance(view, DriverUnavailable):
        return _fail(str(view), form, output, backend_name)
    if isinstance(view, Exception):
        raise view
    _deliver(render(view, form), output)
    reason = view.status.driver_error or "the driver lists no GPU that answers"
    gaps = list_gaps(view, devices_only=devices_only)
    return _conclude(judge_health(view, devices_only=devices_only), reason, view.status.warnings, gaps)


def _conclude_of_daemon(status: str, *, devices_only: bool) -> int:
    """Does the same as `_conclude` for the JSON status of a running exporter, which may have another version."""
    try:
        data = json.loads(status)
        health, gaps = (data.get(f"devices_{key}" if devices_only else key) for key in ("health", "gaps"))
        reason, warnings = data.get("driver_error") or "no GPU answers", data.get("warnings") or ()
    except (ValueError, AttributeError, RecursionError):
        health = None
    if not isinstance(health, str) or health not in EXITS:
        _say("the running exporter has another version and does not report whether all GPUs answer: restart it")
        return Exit.PARTIAL
    gaps = (
        gaps
        if isinstance(gaps, list) and gaps
        else ["the running exporter has another version and does not report what is missing: restart it"]
    )
    return _conclude(health, reason, warnings, gaps)


def _conclude(health: str, reason: str, warnings: Iterable[str], gaps: Sequence[str] = ()) -> int:
    """Prints the warnings and the problem for the user. Returns the exit code. `gaps`: the missing parts of a partial
    view.
    """
    for warning in warnings:
        _say(f"warning: {warning}")
    if health == "no_data":
        _say(f"no GPU data: {reason}")
    elif health == "none_expected":
        _say(f"no GPU is expected here: {reason}")
    elif health == "partial":
        for gap in gaps[:GAPS_MAX]:
            _say(f"partial: {gap}")
        if len(gaps) > GAPS_MAX:
            _say(f"partial: {len(gaps) - GAPS_MAX} more; --format=json names all of them")
    return EXITS.get(health, Exit.DONE)


def _say(line: str) -> None:
    print(f"gpu-exporter: {one_line(line)}", file=sys.stderr)  # noqa: T201 - for the user at the prompt


def _deliver(body: str, output: Path | None) -> None:
    if output is not None:
        write_atomically(output, body.encode("utf-8", "replace"))
        return
    sys.stdout.write(body)
    sys.stdout.flush()  # before the lines on standard error that belong to it


def _fail(reason: str, form: str, output: Path | None, backend_name: str) -> int:
    """Prints the error in one line. Writes it to a textfile too, so that the old values do not remain there. Returns
    the exit code.
    """
    if output is not None:
        status = AgentStatus(VERSION, backend_name, False, reason, 0, 0, 0.0, None, driver_missed=True)
        write_atomically(output, render(View(0.0, status, (), ()), form).encode())
    return _conclude("no_data", reason, ())
