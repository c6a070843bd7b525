"""The audit log: one JSON line for each set or withdrawn mark, and for each action, with its evidence.

The file is opened for each line, so that logrotate may move it. No decision reads it. If a line cannot be written, the
reconciler counts the failure. It then still sets or withdraws the mark, but does not take the action.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.rules import plain_rules
from gpu_exporter.common.files import append_line, open_log, open_named, write_whole
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.version import VERSION
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Mark, timestamp

log = logging.getLogger(__name__)
Record: TypeAlias = dict[str, Any]
STDOUT = Path("-")
STDOUT_NUMBER = 1
LINE_MAX = 1024 * 1024  # bytes: a holder of 4,000 GPUs has 800,000
BEGINNING = b'{"time":'
READ_MAX = 256 * 1024 * 1024  # bytes at the end of the file, the newest
SHOWN_MAX = 20  # transitions of one holder, the newest
MODE = 0o640  # it names users


class AuditLog:
    """Appends lines to a file; `-` means standard output."""

    def __init__(self, path: Path, book: Rulebook, clock: Clock, on_error: Callable[[], None]) -> None:
        """`on_error`: called for every line that cannot be written. Raises OSError if the file is not writable."""
        self._path = path
        self._clock = clock
        self._on_error = on_error
        self._policy = policy_hash(book)
        self._trouble = ""
        self._is_torn = False  # of standard output, which cannot be read
        if path != STDOUT:
            os.close(open_log(path, MODE))

    def note_marked(self, decision: Decision, field: str) -> None:
        """Logs a mark that was set or raised. `field`: the label, or the job's field, that contains the mark."""
        facts = {
            "incarnation": decision.incarnation,
            "stage": decision.stage,
            "reason": decision.reason,
            "field": field,
        }
        self._write("marked", decision.name, {"job": decision.users_id, **facts, **_evidence_of(decision)})

    def note_withdrawn(self, mark: Mark, reason: str, decision: Decision | None) -> None:
        """Logs a mark that was withdrawn. `decision`: the decision from present evidence; None without evidence."""
        facts = {"job": mark.users_id, "incarnation": mark.incarnation, "stage": mark.stage, "reason": reason}
        self._write("withdrawn", mark.name, facts | (_evidence_of(decision) if decision is not None else {}))

    def note_action(self, decision: Decision, facts: Record) -> bool:
        """Logs an action on a holder. `facts`: the action, its result and proofs. Returns whether it was written."""
        return self._write("action", decision.name, {"job": decision.users_id, **facts, **_evidence_of(decision)})

    def note_result(self, name: HolderName, facts: Record) -> None:
        """Logs the result of an action on a holder, of which only the name is still known."""
        self._write("action", name, facts)

    def _write(self, action: str, name: HolderName, facts: Record) -> bool:
        head = {"time": timestamp(self._clock.wall()), "version": VERSION, "policy": self._policy, "action": action}
        record = {**head, **name._asdict(), **facts}
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        trouble = ""
        try:
            if self._path == STDOUT:
                was_torn, self._is_torn = self._is_torn, True
                write_whole(STDOUT_NUMBER, b"\n" + line if was_torn else line)
                self._is_torn = False
            else:
                append_line(self._path, line, MODE)
        except OSError as exc:
            trouble = str(exc)
            self._on_error()
        if trouble != self._trouble:
            log.warning("audit log: %s", f"cannot be written: {trouble}" if trouble else "can be written again")
        self._trouble = trouble
        return not trouble


def _evidence_of(decision: Decision) -> Record:
    """Returns the evidence on a holder. `decided`: the stage that the reconciler chose."""
    around = decision.around
    return {
        "decided": decision.stage,
        "rule": decision.rule.name if decision.rule is not None else "",
        "rule_why": decision.rule_why,
        "owner": decision.owner,
        "class": around.kind if around is not None else "",
        "group": around.group if around is not None else "",
        "gpus_expected": decision.held,
        "gpus_observed": len({(unit.uuid, unit.mig) for unit in decision.units}),
        "observed": timestamp(decision.observed_wall),
        "units": [
            {
                "node": unit.node,
                "gpu": unit.gpu,
                "uuid": unit.uuid,
                "mig": unit.mig,
                "idle_run_seconds": _number(unit.idle_run_s),
                "coverage": _number(unit.coverage),
                "witnesses": unit.witnesses,
                "sample_age_seconds": _number(unit.sample_age_s),
            }
            for unit in decision.units
        ],
    }


def policy_hash(book: Rulebook) -> str:
    """Returns a hash that changes with every setting of the policy and of the site's ordered policies."""
    text = json.dumps([book.site._asdict(), plain_rules(book.rules)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Transitions(NamedTuple):
    """The newest transitions of a holder, oldest first.

    `gap`: why some transitions may be missing; "" if all are there.
    """

    records: list[Record]
    gap: str


def read_transitions(path: Path, asked: HolderName, until_wall: float = math.inf) -> Transitions:
    """Returns the transitions of a holder up to `until_wall` (Unix seconds). Skips other holders. Raises OSError."""
    found: deque[Record] = deque(maxlen=SHOWN_MAX)
    torn = 0
    with open_named(path) as file:
        length = os.fstat(file.fileno()).st_size
        file.seek(max(0, length - READ_MAX))
        lines = _read_lines(file)
        if length > READ_MAX:
            next(lines, None)  # its beginning was not read
        for record in map(_parse, lines):
            if record is None:
                torn += 1
            elif _is_asked(record, asked, until_wall):
                found.append(record)
    gaps = [f"{torn} incomplete lines were skipped"] if torn else []
    gaps += [f"only its last {READ_MAX // 2**20} MiB were read"] if length > READ_MAX else []
    return Transitions(list(found), f"{path}: {', '.join(gaps)}" if gaps else "")


def _is_asked(record: Record, asked: HolderName, until_wall: float) -> bool:
    names = (record.get("name"), record.get("job")) if asked.scheduler == "slurm" else (record.get("name"),)
    place = record.get("scheduler"), record.get("namespace")
    when = parse_timestamp(str(record.get("time")))
    return (
        place == (asked.scheduler, asked.namespace) and asked.name in names and when is not None and when <= until_wall
    )


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields every line. A line longer than LINE_MAX is cut, and then has no line break."""
    while line := file.readline(LINE_MAX):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_MAX)


def _parse(line: bytes) -> Record | None:
    """Returns the record of a line; {} for a line that is not an audit record, None for a line that was cut."""
    try:
        record = json.loads(line.decode("utf-8", "replace")) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return record
    return None if line.startswith(BEGINNING) else {}


def describe(record: Record) -> str:
    """Returns one transition as a line for people."""
    when, action, stage, reason = (one_line(str(record.get(key, ""))) for key in ("time", "action", "stage", "reason"))
    if action == "action":
        stage, reason, why = (one_line(str(record.get(key, ""))) for key in ("act", "result", "why"))
        reason += f": {why}" if why else ""
    gpus = f" ({record['gpus_observed']} of {record['gpus_expected']} GPUs seen)" if "gpus_expected" in record else ""
    return f"{when} {action} {stage}: {reason}{gpus}"


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)
