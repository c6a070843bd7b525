"""`reconcile`: read evidence, decide, print what would be written; with --apply write it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.app.explain import complain
from gpu_exporter.app.serve import repeat_aside, stop_on_signal
from gpu_exporter.clock import SYSTEM_CLOCK
from gpu_exporter.exits import Exit
from gpu_exporter.reconciler.actions.runner import ActionRunner
from gpu_exporter.reconciler.apply import ApplyRuns, withdraw_all
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.cycle import Cycle
from gpu_exporter.reconciler.dry_run import DryRun
from gpu_exporter.reconciler.evidence import EvidenceError, EvidenceSource
from gpu_exporter.reconciler.foresight import Foresight
from gpu_exporter.reconciler.judge import Judge, judge_of
from gpu_exporter.reconciler.marks import Marker
from gpu_exporter.reconciler.pause_note import PauseSource
from gpu_exporter.reconciler.record import Record
from gpu_exporter.reconciler.report import decisions_json, render_decisions
from gpu_exporter.reconciler.rulebook import Rulebook
from gpu_exporter.reconciler.site import ReconcilerSite
from gpu_exporter.reconciler.slurm.demand import SlurmDemand
from gpu_exporter.reconciler.telemetry import Telemetry
from gpu_exporter.web.server import HttpServer, Site

if TYPE_CHECKING:
    from gpu_exporter.reconciler.kubernetes.lease import Lease


def reconcile_once(
    source: EvidenceSource,
    book: Rulebook,
    form: str,
    foresight: Foresight,
    pauses: Sequence[PauseSource] = (),
) -> int:
    """One cycle that writes nothing; the exit code."""
    try:
        evidence, decisions, problems, *_ = Judge(source, foresight.surveyor, book, SYSTEM_CLOCK, pauses).judge()
    except EvidenceError as exc:
        complain(f"nothing decided: {exc}")
        return Exit.NO_DATA
    outlooks = foresight.look(decisions, SYSTEM_CLOCK.wall())
    for text in (*(f"not seen: {problem}" for problem in problems), *foresight.notices):
        complain(text)
    render = decisions_json if form == "json" else render_decisions
    sys.stdout.write(render(decisions, evidence, outlooks))
    return Exit.PARTIAL if problems else Exit.DONE


def serve_telemetry(
    address: str, telemetry: Telemetry, interval_s: float, web_config: Path | None, *, collects: bool
) -> None:
    """Serve /metrics and probes at `[host]:port` from threads of their own; `collects`: and what
    slurm-collector serves. Raises OSError, ValueError.
    """
    site: Site = ReconcilerSite(telemetry, interval_s)
    if not collects:
        HttpServer(address, site, web_config=web_config).start()
        return
    from gpu_exporter.app.collect import collect_beside, collect_on

    site, run = collect_beside(site, telemetry.registry)
    server = HttpServer(address, site, web_config=web_config)
    run.is_open = server.is_open
    server.start()
    collect_on(run)


def _cycle_until_signal(
    tick: Callable[[], object],
    interval_s: float,
    telemetry: Telemetry,
    demand: SlurmDemand | None,
    stop: threading.Event,
    leads: Callable[[], bool] = lambda: True,
    rests: Callable[[], bool] = lambda: False,
) -> None:
    def tick_and_ask() -> None:
        tick()
        if demand is not None and not rests():  # one replica asks, and publishes the answer
            telemetry.note_demand(demand.read() if leads() else None)

    repeat_aside(tick_and_ask, interval_s, stop)


def apply_forever(
    source: EvidenceSource,
    markers: Sequence[Marker],
    book: Rulebook,
    interval_s: float,
    telemetry: Telemetry,
    demand: SlurmDemand | None,
    lease: Lease | None,
    audit: AuditLog | None,
    pauses: Sequence[PauseSource],
    record: Record,
    build_actions: Callable[[Judge, Callable[[], bool]], ActionRunner | None],
) -> int:
    """Cycle and write until a signal; where there is a lease, while it is ours.

    `build_actions`: what acts on underused holders, given what judges them and what says whether this process may
    write.
    """
    stop, may_write = stop_on_signal(), lease.may_write if lease is not None else lambda: True
    judge = judge_of(source, markers, book, SYSTEM_CLOCK, pauses if lease is None else [*pauses, lease], record)
    actions = build_actions(judge, may_write)
    act = actions.run if actions is not None else None
    cycle = Cycle(judge, markers, book.site, telemetry, SYSTEM_CLOCK, may_write=may_write, audit=audit, act=act)
    runs = ApplyRuns(cycle, telemetry, SYSTEM_CLOCK, lease, interval_s, record.forget)
    if lease is not None:
        lease.keep(stop)
    _cycle_until_signal(runs.run, interval_s, telemetry, demand, stop, may_write, lambda: runs.rests)
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
    """One cycle that writes; the exit code. Marks without evidence go at once: a single cycle cannot wait for it."""
    judge = judge_of(source, markers, book, SYSTEM_CLOCK, pauses)
    cycle = Cycle(judge, markers, book.site, telemetry, SYSTEM_CLOCK, once=True, audit=audit)
    return Exit.PARTIAL if ApplyRuns(cycle, telemetry, SYSTEM_CLOCK).run() else Exit.DONE


def remove_all(markers: Sequence[Marker], apply: bool) -> int:
    """Print every mark, withdraw it with `apply`; the exit code. Raises MarkError when they cannot be listed."""
    code: int = Exit.DONE
    for line, is_done in withdraw_all(markers, SYSTEM_CLOCK, apply=apply):
        print(line)  # noqa: T201
        code = code if is_done else Exit.PARTIAL
    return code


def reconcile_forever(
    source: EvidenceSource,
    book: Rulebook,
    interval_s: float,
    telemetry: Telemetry,
    foresight: Foresight,
    demand: SlurmDemand | None,
    pauses: Sequence[PauseSource],
    record: Record,
) -> int:
    """Cycle until a signal; log each change of what --apply would write or refuse."""
    judge = Judge(source, foresight.surveyor, book, SYSTEM_CLOCK, pauses, record)
    dry = DryRun(judge, book.site, telemetry, foresight, SYSTEM_CLOCK)
    _cycle_until_signal(dry.run, interval_s, telemetry, demand, stop_on_signal())
    return 0
