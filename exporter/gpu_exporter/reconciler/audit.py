"""The audit log: one JSON line for every mark that was set or withdrawn, and for every action, with its evidence.

The file is opened for each line, so that logrotate may move it. Decisions never read it. A line that cannot be written
is counted, and prevents no mark.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.rules import plain_rules
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
LINE_MAX = 1024 * 1024  # characters: a holder of 4,000 GPUs has 800,000
SHOWN_MAX = 20  # transitions of one holder, the newest
MODE = 0o640  # it names users


class AuditLog:
    """Appends lines to one file; `-` is standard output."""

    def __init__(self, path: Path, book: Rulebook, clock: Clock, on_error: Callable[[], None]) -> None:
        """`on_error`: called for every line that cannot be written. Raises OSError where the file is not writable."""
        self._path = path
        self._clock = clock
        self._on_error = on_error
        self._policy = policy_hash(book)
        self._trouble = ""
        if path != STDOUT:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE))

    def note_marked(self, decision: Decision, field: str) -> None:
        """Log a mark that was set, or rose. `field`: the label or the field of the job that carries it."""
        facts = {
            "incarnation": decision.incarnation,
            "stage": decision.stage,
            "reason": decision.reason,
            "field": field,
        }
        self._write("marked", decision.name, {"job": decision.users_id, **facts, **_evidence_of(decision)})

    def note_withdrawn(self, mark: Mark, reason: str, decision: Decision | None) -> None:
        """Log a mark that was withdrawn. `decision`: by the evidence; None without evidence."""
        facts = {"job": mark.users_id, "incarnation": mark.incarnation, "stage": mark.stage, "reason": reason}
        self._write("withdrawn", mark.name, facts | (_evidence_of(decision) if decision is not None else {}))

    def note_action(self, decision: Decision, facts: Record) -> bool:
        """Log an act on a holder. `facts`: the act, its result and its proofs. False where the line was not written."""
        return self._write("action", decision.name, {"job": decision.users_id, **facts, **_evidence_of(decision)})

    def note_result(self, name: HolderName, facts: Record) -> None:
        """Log the result of an act on a holder, of which only the name is still known."""
        self._write("action", name, facts)

    def _write(self, action: str, name: HolderName, facts: Record) -> bool:
        head = {"time": timestamp(self._clock.wall()), "version": VERSION, "policy": self._policy, "action": action}
        line = json.dumps({**head, **name._asdict(), **facts}, allow_nan=False, separators=(",", ":")) + "\n"
        trouble = ""
        try:
            if self._path == STDOUT:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:  # one write per line, so that the lines of two processes do not mix
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)
                try:
                    os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)
        except OSError as exc:
            trouble = str(exc)
            self._on_error()
        if trouble != self._trouble:
            log.warning("audit log: %s", f"cannot be written: {trouble}" if trouble else "can be written again")
        self._trouble = trouble
        return not trouble


def _evidence_of(decision: Decision) -> Record:
    """The evidence on a holder. `decided`: the stage that followed from it."""
    around = decision.around
    return {
        "decided": decision.stage,
        "rule": decision.rule.name if decision.rule is not None else "",
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
    """A hash that changes with every setting of the policy, and with every one of the site's policies."""
    text = json.dumps([book.site._asdict(), plain_rules(book.rules)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_transitions(path: Path, asked: HolderName, until_wall: float = math.inf) -> list[Record]:
    """The newest transitions of a holder up to `until_wall` (Unix seconds), oldest first. Raises OSError.

    Skips lines that are not audit records.
    """
    found: deque[Record] = deque(maxlen=SHOWN_MAX)
    for record in _records(path):
        names = (record.get("name"), record.get("job")) if asked.scheduler == "slurm" else (record.get("name"),)
        place = record.get("scheduler"), record.get("namespace")
        when = parse_timestamp(str(record.get("time"))) or 0.0
        if place == (asked.scheduler, asked.namespace) and asked.name in names and when <= until_wall:
            found.append(record)
    return list(found)


def _records(path: Path) -> Iterator[Record]:
    with path.open("r", encoding="utf-8", errors="replace") as file:
        while line := file.readline(LINE_MAX):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and parse_timestamp(str(record.get("time"))) is not None:
                yield record


def describe(record: Record) -> str:
    """One transition as a line for people."""
    when, action, stage, reason = (one_line(str(record.get(key, ""))) for key in ("time", "action", "stage", "reason"))
    if action == "action":
        stage, reason = (one_line(str(record.get(key, ""))) for key in ("act", "result"))
    gpus = f" ({record['gpus_observed']} of {record['gpus_expected']} GPUs seen)" if "gpus_expected" in record else ""
    return f"{when} {action} {stage}: {reason}{gpus}"


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)
