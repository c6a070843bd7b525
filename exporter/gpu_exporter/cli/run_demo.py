"""`demo`: a simulated node on a compressed clock, so that an idle allocation becomes underused within a minute.

It also shows why GPUs are not used, and the effect of one fix. Only the driver, the holders and the clock are
simulated. Sampling, ledger, attribution, server and reconciler run as in production; the reconciler reads /metrics over
HTTP.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_exporter.agent.devices.scenario import load_scenario
from gpu_exporter.agent.exposition.publisher import Publisher
from gpu_exporter.agent.exposition.site import ExporterSite
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.runtime.serve import ProcessSeries
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.agent.runtime.surroundings import Host, Publishing
from gpu_exporter.cli.output import is_read
from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import CompressedClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.views import AllocationView, View
from gpu_exporter.common.service import repeat, stop_on_signal
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.web.server import HttpServer
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import settle
from gpu_exporter.reconciler.decision.surroundings import INTERACTIVE, SERVING, Surroundings
from gpu_exporter.reconciler.dry_run import StageTracker
from gpu_exporter.reconciler.evidence.exporters import ExporterSource
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.report import render_decisions

SCENARIO = Path(__file__).resolve().parent / "demo.yaml"
INTERVAL_S = 15.0  # of the compressed clock: 11 GPUs at 12 samples a second keep a core 95 % free
SAMPLE_PERIOD_S = 5.0
AROUND = {  # as the API server of a cluster would show it
    HolderName("kubernetes", "serving", "embedder-1"): Surroundings(kind=SERVING, kind_why="Service embedder-1"),
    HolderName("kubernetes", "nlp", "notebook-ada"): Surroundings(kind=INTERACTIVE, kind_why="owner Notebook/ada"),
}
ALONE = (
    "As in a cluster, embedder-1 serves requests and gets no mark. notebook-ada is a notebook, which becomes underused "
    "only after four hours (docs/reconciler.md, Surroundings)."
)
FIRST_LOOK_S = 1320.0  # a state is judged over ten minutes, and one GPU has made no progress since second 300
# As demo.yaml: a GPU whose job hangs, one that works at low power, one with an uncertain cause, the job that is fixed.
HANGS, WORKS, EXPLAINED, FIXED = 8, 0, 3, "48121"
FIX_S = 2400.0
FIXED_LOOK_S = FIX_S + 1020.0  # after the window of the state and its hold
PERIOD_MAX_S = 2 * INTERVAL_S  # how long a reading counts: on a busy machine, a cycle of the fast clock comes late


STEP_MAX_S = 4 * INTERVAL_S  # three of these gaps without a reading end an idle run


def demo_settings() -> Settings:
    """Returns the defaults, with sampling and polling at the pace of the compressed clock."""
    settings = Settings()
    return settings._replace(
        sampling=settings.sampling._replace(interval=INTERVAL_S, deadline=600.0, withhold_min=300.0),
        attribution=settings.attribution._replace(interval=30.0),
        ledger=settings.ledger._replace(idle_run_unknown_reset=180.0),
    )


def run_demo(address: str, speed: float, duration_s: float | None) -> int:
    """Serves the simulated node. Prints its table, the reasons behind it, each label that the reconciler would write,
    the effect of a fix, and the decisions.

    The demo ends after `duration_s` times `speed` seconds of its clock (longer on a busy machine), or never without
    `duration_s`. Raises ValueError, OSError for a bad address.
    """
    clock = CompressedClock(speed, STEP_MAX_S)
    settings = demo_settings()
    simulation = build_simulation(load_scenario(SCENARIO), clock, SAMPLE_PERIOD_S)
    note = f"Simulated GPUs; one second here is {speed / 60:g} minutes there."
    publishing = Publishing(note, driver_period_max_s=PERIOD_MAX_S)
    host = Host(reader=simulation.host)
    agent = Agent(settings, simulation.backend, [simulation.source], clock, publishing=publishing, host=host)
    process = ProcessSeries()
    publisher = Publisher(agent.view, agent.version, lambda: process.series, agent.node.history)
    server = HttpServer(address, ExporterSite(publisher, agent.readiness))
    agent.start()
    server.start()
    page = f"http://127.0.0.1:{server.port}/"
    evidence = ExporterSource([parse_address(f"{page}metrics")], settings.policy.underused_after, clock)
    tracker, book = StageTracker(), Rulebook(settings.policy)
    stop = stop_on_signal()
    report = ""
    due = [
        (FIRST_LOOK_S, lambda: _show_first(publisher, agent.view())),
        (FIX_S, lambda: _say(f"\nThe demo follows the advice: it restarts job {FIXED} with OMP_NUM_THREADS=4.")),
        (FIXED_LOOK_S, lambda: _show_fixed(agent.view())),
    ]

    def tick() -> None:
        nonlocal report
        if not agent.is_complete():
            return
        process.refresh()
        while due and clock.elapsed_s > due[0][0]:
            due[0][1]()  # again in the next tick if it fails, as for a value that a busy machine has not read in time
            due.pop(0)
        elapsed = clock.elapsed_s / speed
        seen = evidence.read_evidence()
        decisions = settle(seen, decide(seen, settings.policy), AROUND, book)
        report = render_decisions(decisions, seen)
        for line in tracker.changes(decisions) if not due else ():
            _say(f"  {elapsed:4.0f} s  {line}")
        if not is_read() or (duration_s is not None and elapsed >= duration_s):
            stop.set()

    _say(f"Status page {page}  metrics {page}metrics")
    end = "Ctrl-C ends the demo. " if duration_s is None else ""
    _say(f"{note} {end}Looking at the first minutes ...\n")
    repeat(tick, 0.5, stop, Task("demo"))
    _say("\nThe node at the end:\n" + publisher.body("table").decode())
    _say(f"Decisions at the end (dry run, nothing is written). {ALONE}\n{report}")
    server.stop()
    agent.stop()
    return 0


def _show_first(publisher: Publisher, view: View) -> None:
    """Prints the table, and data that other tools do not show."""
    by_gpu = {allocation.gpu: allocation for allocation in view.allocations}
    hangs, works, explained = by_gpu[HANGS], by_gpu[WORKS], by_gpu[EXPLAINED]
    seen = [
        f"nvidia-smi shows GPU {each.gpu}: {each.utilization:.0%}, {each.power_w:.0f} W, memory in use by a process."
        for each in (hangs, works)
    ]
    _say("\n".join([publisher.body("table").decode(), *seen]))
    _say(f"gpu-exporter: GPU {works.gpu} is {works.verdict.state}, GPU {hangs.gpu} is {hangs.verdict.state}:")
    _say(f"  {hangs.verdict.evidence}\n")
    _explain(explained)


def _show_fixed(view: View) -> None:
    """Prints the changes that the fix has made. The first marks come after this."""
    job = next(each for each in view.allocations if each.allocation.holder.job_id == FIXED)
    found = ", ".join(cause.name for cause in job.causes.found) or "none"
    _say(f"Seventeen minutes later, job {FIXED} is {job.verdict.state} ({job.verdict.evidence}), cause: {found}.")
    _say("\nMarks that the reconciler would write, as they happen (dry run):")


def _explain(view: AllocationView) -> None:
    _say(f"Why {view.allocation.holder.label} is {view.verdict.state} ({view.verdict.evidence}):")
    for cause in view.causes.ranked:
        _say(f"  {cause.name}, {cause.confidence} confidence: {cause.evidence}")
        parts = {"against it": cause.against, "to change": cause.advice, "gain": cause.gain}
        for name, text in parts.items():
            if text:
                _say(f"    {name}: {text}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
