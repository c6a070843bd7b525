"""`reconcile`: reads evidence, decides, and prints the marks that --apply would write. With --apply, writes them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.service import repeat_aside, stop_on_signal
from gpu_exporter.common.tasks import Task
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.apply import ApplyRuns, withdraw_all
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.dry_run import DryRun
from gpu_exporter.reconciler.evidence.records import EvidenceSource, ExplainingSource
from gpu_exporter.reconciler.judge import Judge, judge_of
from gpu_exporter.reconciler.marks import Marker, MarkError
from gpu_exporter.reconciler.pause import PauseSource
from gpu_exporter.reconciler.preview import Preview
from gpu_exporter.reconciler.report import decisions_json, render_decisions
from gpu_exporter.reconciler.runtime.actions import ActionPlan
from gpu_exporter.reconciler.runtime.explain import complain
from gpu_exporter.reconciler.slurm.demand import SlurmDemand
from gpu_exporter.reconciler.telemetry import Telemetry

if TYPE_CHECKING:
    from gpu_exporter.reconciler.kubernetes.client.lease import Lease

# A reconciler that ends releases its Lease within the 20 s that the chart grants its pod. One that was killed holds the
# Lease for 15 s.
PATIENCE_S = 45.0
FIRST_LOOK_S = 3.0


def reconcile_once(
    source: ExplainingSource,
    book: Rulebook,
    form: str,
    preview: Preview,
    pauses: Sequence[PauseSource] = (),
) -> int:
    """Runs one cycle that writes nothing. Returns the exit code."""
    try:
        evidence, decisions, problems, *_ = Judge(source, preview.surveyor, book, pauses).judge()
    except AnswerError as exc:
        complain(f"the reconciler made no decisions: {exc}")
        return Exit.NO_DATA
    outlooks = preview.look(decisions, SYSTEM_CLOCK.wall())
    incomplete = [f"the evidence is incomplete: {problem}" for problem in problems]
    for text in (*incomplete, *source.read_gaps(), *preview.notices):
        complain(text)
    render = decisions_json if form == "json" else render_decisions
    sys.stdout.write(render(decisions, evidence, outlooks))
    return Exit.PARTIAL if problems else Exit.DONE


class Reconciler(NamedTuple):
    """The parts that decide in every cycle. `demand`: reads the pending jobs of Slurm; None without Slurm."""

    source: EvidenceSource
    book: Rulebook
    pauses: Sequence[PauseSource]
    telemetry: Telemetry
    record: Record
    demand: SlurmDemand | None
    interval_s: float


class Writing(NamedTuple):
    """The parts that write decisions.

    `lease`: only the reconciler that holds this Lease writes; None if there is only one reconciler. `actions`: the plan
    for actions on underused holders.
    """

    markers: Sequence[Marker]
    lease: Lease | None
    audit: AuditLog | None
    actions: ActionPlan


def _cycle_until_signal(
    tick: Callable[[], object],
    task: Task,
    parts: Reconciler,
    stop: threading.Event,
    leads: Callable[[], bool] = lambda: True,
    rests: Callable[[], bool] = lambda: False,
) -> None:
    parts.telemetry.own.tasks.add(task)

    def tick_and_ask() -> None:
        parts.telemetry.own.tasks.watch()
        tick()
        if parts.demand is not None and not rests():  # one replica asks Slurm, and publishes the answer
            parts.telemetry.note_demand(parts.demand.read() if leads() else None)

    repeat_aside(tick_and_ask, parts.interval_s, stop, task)


def apply_forever(parts: Reconciler, writing: Writing) -> int:
    """Runs cycles that write, until a signal arrives. With a Lease, writes only while this process holds it."""
    lease, telemetry, record = writing.lease, parts.telemetry, parts.record
    stop, may_write = stop_on_signal(), lease.may_write if lease is not None else lambda: True
    pauses = parts.pauses if lease is None else [*parts.pauses, lease]
    judge = judge_of(parts.source, writing.markers, parts.book, pauses, record)
    actions = writing.actions.build(writing.markers, judge, record, telemetry, writing.audit, may_write)
    cycle = ReconcileCycle(
        judge,
        writing.markers,
        parts.book.site,
        telemetry,
        SYSTEM_CLOCK,
        CycleHooks(may_write=may_write, audit=writing.audit, act=actions.run if actions is not None else None),
    )
    runs = ApplyRuns(cycle, telemetry, SYSTEM_CLOCK, lease, parts.interval_s, record.forget)
    if lease is not None:
        telemetry.own.tasks.add(lease.task)
        lease.keep(stop)
    _cycle_until_signal(runs.run, cycle.task, parts, stop, may_write, lambda: runs.rests)
    if lease is not None:
        lease.release()
    return 0


def apply_once(
    source: EvidenceSource,
    markers: Sequence[Marker],
    book: Rulebook,
    telemetry: Telemetry,
    audit: AuditLog | None,
    pauses: Sequence[PauseSource],
) -> int:
    """Runs one cycle that writes. Returns the exit code.

    Marks without evidence are removed immediately, because a single cycle cannot wait for evidence.
    """
    judge = judge_of(source, markers, book, pauses)
    cycle = ReconcileCycle(judge, markers, book.site, telemetry, SYSTEM_CLOCK, CycleHooks(audit=audit), once=True)
    return Exit.PARTIAL if ApplyRuns(cycle, telemetry, SYSTEM_CLOCK).run() else Exit.DONE


def remove_all(
    markers: Sequence[Marker],
    *,
    apply: bool,
    lease: Lease | None = None,
    patience_s: float = PATIENCE_S,
    form: str = "table",
) -> int:
    """Prints every mark, as JSON if `form` is json. With `apply`, also withdraws the marks. Returns the exit code.

    With a Lease, writes only while this process holds it, because a reconciler that is about to end could set a mark
    again. Raises MarkError if the marks cannot be listed, or if the Lease is not free within `patience_s`.
    """
    stop = threading.Event()
    may_write = lease.may_write if lease is not None else lambda: True
    code: int = Exit.DONE
    try:
        if lease is not None:
            lease.keep(stop)
            if not lease.wait(FIRST_LOOK_S):
                complain(f"waiting at most {patience_s:.0f} s for the Lease: {lease.describe()}")
                if not lease.wait(patience_s):
                    hint = "; stop that reconciler first, or run it without --apply"
                    raise MarkError("fenced", f"no mark was removed: {lease.describe()}{hint}")
        for each in withdraw_all(markers, SYSTEM_CLOCK, apply=apply, may_write=may_write):
            facts = {"holder": each.title, "stage": each.stage, "outcome": each.outcome, "done": each.is_done}
            line = f"{each.title}: {each.stage}: {each.outcome}"
            print(json.dumps(facts) if form == "json" else one_line(line))  # noqa: T201
            code = code if each.is_done else Exit.PARTIAL
    finally:
        stop.set()
        if lease is not None:
            lease.release()
    return code


def reconcile_forever(parts: Reconciler, preview: Preview) -> int:
    """Runs dry-run cycles until a signal. Logs each change of the marks that --apply would write or refuse."""
    judge = Judge(parts.source, preview.surveyor, parts.book, parts.pauses, parts.record)
    dry = DryRun(judge, parts.book.site, parts.telemetry, preview, SYSTEM_CLOCK)
    _cycle_until_signal(dry.run, dry.task, parts, stop_on_signal())
    return 0
