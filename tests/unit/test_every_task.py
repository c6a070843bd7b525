"""Everything that runs for ever is in one table, and survives an error in each of its turns."""

from __future__ import annotations

import ast
import base64
import contextlib
import http.client
import logging
import re
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import bcrypt
import pytest
from tests.testbed.processes import free_port, wait_for
from tests.unit.test_architecture import MODULES, PACKAGE

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import SimulatedEvents
from gpu_exporter.agent.exposition.publisher import Publisher
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.runtime import collect, serve, simulation
from gpu_exporter.agent.runtime.agent import Agent
from gpu_exporter.agent.runtime.runtime import Runtime
from gpu_exporter.agent.runtime.serve import ProcessSeries
from gpu_exporter.agent.runtime.simulation import SimulatedHost, build_simulation
from gpu_exporter.agent.runtime.surroundings import Host
from gpu_exporter.agent.sampling import events, kernel_log, manager
from gpu_exporter.agent.sampling.kernel_log import KernelLogLoop
from gpu_exporter.agent.sampling.loop import DeviceLoop
from gpu_exporter.agent.sampling.manager import DeviceManager
from gpu_exporter.agent.slurm_collector.collector import CollectorRun
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.service import follow_signals
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.web import door
from gpu_exporter.common.web import server as web
from gpu_exporter.common.web.secure import Security, WebConfig
from gpu_exporter.common.web.server import HttpServer, Site
from gpu_exporter.diagnosis.host import loop as host_loop
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.loop import HostLoop, HostNode
from gpu_exporter.diagnosis.host.progress import ProgressReader
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.loop import DiagnosisLoop
from gpu_exporter.diagnosis.training.files import TrainingPlaces, TrainingReader
from gpu_exporter.reconciler.kubernetes.client import lease
from gpu_exporter.reconciler.kubernetes.client.lease import Lease
from gpu_exporter.reconciler.runtime import loops
from gpu_exporter.reconciler.site import ReconcilerSite
from gpu_exporter.reconciler.telemetry import Telemetry

STARTERS = {
    *("Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("create_task", "ensure_future", "TaskGroup", "repeat", "repeat_aside", "follow_signals"),
}
# Each place that starts something: the tasks for ever that it starts, or why it starts none.
PLACES: dict[str, tuple[str, ...] | str] = {
    "agent/runtime/agent.py Agent._spawn": ("attribution", "diagnosis", "host", "state"),
    "agent/runtime/collect.py collect": ("slurm-collector",),
    "agent/runtime/collect.py collect_beside": ("slurm-collector",),
    "agent/runtime/serve.py release_on_signal": ("signal",),
    "agent/runtime/serve.py serve": ("process",),
    "agent/runtime/serve.py write_textfiles": ("textfile",),
    "agent/sampling/manager.py DeviceManager.start": ("driver",),
    "agent/sampling/worker.py Worker.__init__": ("gpu", "events", "kernel-log"),
    "cli/run_demo.py run_demo": ("demo",),
    "common/service.py _Follower.__init__": ("signal",),
    "common/service.py stop_on_signal": ("signal",),
    "common/service.py repeat_aside": ("cycle", "slurm-collector"),
    "common/web/door.py Doorkeeper.admits": ("http-password",),
    "common/web/door.py Doorkeeper.__init__": ("http-password",),
    "common/web/server.py HttpServer.start": ("web-config",),
    "diagnosis/host/loop.py HostLoop._keep_training": ("training",),
    "reconciler/kubernetes/client/lease.py Lease.keep": ("lease",),
    "reconciler/runtime/loops.py _cycle_until_signal": ("cycle",),
    "agent/attribution/poller.py _Question.__init__": "one poll, which keeps every error as its answer",
    "agent/runtime/once.py run_once": "one reading",
    "agent/runtime/record.py record": "ends with the recording, which a person started",
    "agent/runtime/runtime.py Runtime.run_once": "one poll",
    "agent/runtime/serve.py stop_on_change": "waits for one event",
    "agent/sampling/reader.py Reader.__init__": "one reading",
    "agent/sampling/reader.py Readers.start": "one opening of the driver",
    "common/fetch.py _Deadline.__init__": "one deadline",
    "common/threads.py run_ahead": "ends with its items, and hands every error to the caller",
    "common/web/server.py _Listener._accept": "one connection; an error ends this connection",
    "common/web/server.py HttpServer._run": "workers of one answer each; an error is answered with status 500",
    "common/web/server.py HttpServer.__init__": "the loop that only waits for the end; a probe shows whether it answers",
    "reconciler/evidence/exporters.py ExporterSource._read_pages": "ends with its pages, and keeps every error",
    "reports/top/terminal.py _KeyReader.__init__": "reads while a person watches, and shows every error on the screen",
}
NAMED = {name for names in PLACES.values() if isinstance(names, tuple) for name in names}


def calls(tree: ast.AST, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the name of what is called and where, as Class.method."""
    for node in ast.iter_child_nodes(tree):
        inner = place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*place, node.name)
        elif isinstance(node, ast.Call):
            yield ".".join(place), node
        yield from calls(node, inner)


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_each_place_that_starts_something_is_in_the_table_and_each_task_has_a_case() -> None:
    places, tasks = set(), set()
    for path in MODULES:
        source = path.read_text("utf-8")
        for place, node in calls(ast.parse(source)):
            if called(node) in STARTERS:
                places.add(f"{path.relative_to(PACKAGE)} {place}")
            if called(node) == "Task" and isinstance(node.args[0], ast.Constant):
                tasks.add(node.args[0].value)
    assert places == set(PLACES)
    assert tasks | {collect.TASK} == NAMED
    assert NAMED - {"demo"} == set(CASES)


class Broken:
    """A method whose first two calls raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls = 0
        true = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls <= 2:
                raise KeyError("injected")
            return true(*given, **named)

        monkeypatch.setattr(owner, name, call)


class Bench:
    """What a case needs: its broken method, the end of its threads, and where its failures are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, stack: contextlib.ExitStack) -> None:
        self.monkeypatch, self.folder, self.stack = monkeypatch, folder, stack
        self.stop = threading.Event()

    def soon(self, module: Any, *names: str) -> None:
        for name in names:
            self.monkeypatch.setattr(module, name, 0.01)

    def broken(self, owner: type, name: str) -> Broken:
        return Broken(self.monkeypatch, owner, name)

    def aside(self, run: Callable[[], object]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.stack.callback(thread.join, 60.0)
        self.stack.callback(self.stop.set)

    def agent(self) -> Agent:
        settings = Settings()
        settings = settings._replace(
            sampling=settings.sampling._replace(interval=0.02),
            attribution=settings.attribution._replace(interval=0.01),
            diagnosis=settings.diagnosis._replace(interval=0.01),
        )
        (self.folder / "kmsg").touch()
        simulated = build_simulation(parse_scenario({"gpus": [{"model": "T4"}]}), SYSTEM_CLOCK)
        host = Host(kmsg=self.folder / "kmsg", reader=simulated.host)
        state = StateFile(self.folder, 0.01, "boot")
        return Agent(settings, simulated.backend, [simulated.source], SYSTEM_CLOCK, state, host=host)


Counted = Callable[[str], int | None]
Case = Callable[[Bench], tuple[Broken, Counted]]


def failures(page: Callable[[], str]) -> Counted:
    def count(task: str) -> int | None:
        found = re.search(rf'_task_failures_total\{{task="{task}"\}} (\d+)', page())
        return int(found[1]) if found else None

    return count


def of_agent(agent: Agent) -> Counted:
    def count(task: str) -> int | None:
        (series,) = [s for s in list_series(agent.view()) if s.family.name == "gpu_exporter_task_failures_total"]
        return next((int(value) for labels, value in series.rows if labels == (task,)), None)

    return count


def in_agent(owner: type, name: str) -> Case:
    def case(bench: Bench) -> tuple[Broken, Counted]:
        bench.soon(manager, "CHECK_S")
        bench.soon(events, "RETRY_S")
        bench.soon(kernel_log, "RETRY_S", "LOOK_S")
        bench.soon(simulation, "TICK_S")
        broken, agent = bench.broken(owner, name), bench.agent()
        agent.start()
        bench.stack.callback(agent.stop)
        return broken, of_agent(agent)

    return case


def in_daemon(run: Callable[[Bench, Agent], object], owner: type, name: str) -> Case:
    def case(bench: Bench) -> tuple[Broken, Counted]:
        bench.soon(serve, "PROCESS_REFRESH_S")
        bench.monkeypatch.setattr(serve, "follow_signals", lambda _: Task("signal"))
        bench.monkeypatch.setattr(serve, "stop_on_signal", lambda: bench.stop)
        broken, agent = bench.broken(owner, name), bench.agent()
        bench.aside(lambda: run(bench, agent))
        return broken, of_agent(agent)

    return case


def in_host(owner: type, name: str) -> Case:
    def case(bench: Bench) -> tuple[Broken, Counted]:
        bench.soon(host_loop, "TICK_S")

        class NoLooks:
            def read(self, *_: object) -> Iterator[Any]:
                return iter(())

        cgroups = Cgroups(bench.folder)
        broken = bench.broken(owner, name)
        loop = HostLoop(
            HostWorks(cgroups, SYSTEM_CLOCK, 8),
            ProgressReader(cgroups, SYSTEM_CLOCK, None),
            NoLooks(),
            SYSTEM_CLOCK,
            TrainingReader(TrainingPlaces(bench.folder, bench.folder), SYSTEM_CLOCK),
        )
        node = HostNode(lambda: ((), 1), tuple, lambda *_: None, tuple, lambda *_: None, lambda *_: None)
        bench.aside(lambda: loop.run(bench.stop, node))
        return broken, lambda name: {task.name: task.failures for task in loop.tasks}[name]

    return case


def serve_telemetry(bench: Bench, telemetry: Telemetry, text: str) -> HttpServer:
    path = bench.folder / "web.yaml"
    path.write_text(text)
    server = HttpServer("127.0.0.1:0", cast(Site, ReconcilerSite(telemetry, 30.0)), web_config=path)
    telemetry.own.note_server(server)
    server.start()
    bench.stack.callback(server.stop)
    return server


def of_telemetry(telemetry: Telemetry) -> Counted:
    def count(task: str) -> int | None:
        value = telemetry.registry.get_sample_value("gpu_reconciler_task_failures_total", {"task": task})
        return None if value is None else int(value)

    return count


def web_config(bench: Bench) -> tuple[Broken, Counted]:
    bench.soon(web, "RELOAD_S")
    broken, telemetry = bench.broken(WebConfig, "turn"), Telemetry()
    serve_telemetry(bench, telemetry, "{}\n")
    return broken, of_telemetry(telemetry)


def http_password(bench: Bench) -> tuple[Broken, Counted]:
    bench.monkeypatch.setattr(door, "PATIENCE_S", 600.0)  # an answer that comes only after this time is none
    broken, telemetry = bench.broken(Security, "admits"), Telemetry()
    hashed = bcrypt.hashpw(b"pass", bcrypt.gensalt(4)).decode()
    server = serve_telemetry(bench, telemetry, f"basic_auth_users: {{ada: {hashed}}}\n")

    def ask(password: str) -> int:
        client = http.client.HTTPConnection("127.0.0.1", server.port, 60.0)
        with contextlib.closing(client):
            code = base64.b64encode(f"ada:{password}".encode()).decode()
            client.request("GET", "/metrics", headers={"Authorization": f"Basic {code}"})
            return client.getresponse().status

    assert [ask("pass") for _ in range(3)] == [429, 429, 200]
    assert ask("word") == 401
    return broken, of_telemetry(telemetry)


def cycle(bench: Bench) -> tuple[Broken, Counted]:
    class Ticks:
        def tick(self) -> None:
            return

    broken, telemetry, ticks = bench.broken(Ticks, "tick"), Telemetry(), Ticks()
    parts = loops.Reconciler(None, None, (), telemetry, None, None, 0.01)  # type: ignore[arg-type]
    bench.aside(lambda: loops._cycle_until_signal(ticks.tick, loops.Task("cycle"), parts, bench.stop))
    return broken, of_telemetry(telemetry)


def keep_lease(bench: Bench) -> tuple[Broken, Counted]:
    bench.soon(lease, "RETRY_S")
    bench.monkeypatch.setattr(Lease, "tick", lambda _: None)
    broken, kept = bench.broken(Lease, "tick"), Lease(None, "ns", "name", SYSTEM_CLOCK)  # type: ignore[arg-type]
    kept.keep(bench.stop)
    bench.stack.callback(bench.stop.set)
    return broken, lambda _: kept.task.failures


def slurm_collector(bench: Bench) -> tuple[Broken, Counted]:
    bench.monkeypatch.setattr(collect, "stop_on_signal", lambda: bench.stop)
    bench.monkeypatch.setattr(CollectorRun, "__call__", lambda _: True)
    broken, port = bench.broken(CollectorRun, "__call__"), free_port()
    bench.aside(lambda: collect.collect(None, None, 0.01, f"127.0.0.1:{port}", None, once=False))

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as answer:
            return str(answer.read().decode())

    return broken, failures(page)


def follow(bench: Bench) -> tuple[Broken, Counted]:
    class Actions:
        def act(self) -> None:
            return

    broken, actions = bench.broken(Actions, "act"), Actions()
    task = follow_signals({signal.SIGUSR1: lambda: actions.act()})
    before = task.failures
    for _ in range(4):
        signal.raise_signal(signal.SIGUSR1)
    return broken, lambda _: task.failures - before


CASES: dict[str, Case] = {
    "driver": in_agent(DeviceManager, "_look"),
    "gpu": in_agent(DeviceLoop, "_cycle"),
    "events": in_agent(SimulatedEvents, "wait"),
    "attribution": in_agent(Runtime, "settle"),
    "diagnosis": in_agent(DiagnosisLoop, "judge"),
    "state": in_agent(NodeState, "write_state"),
    "kernel-log": in_agent(KernelLogLoop, "look"),
    "host": in_host(HostWorks, "read"),
    "training": in_host(TrainingReader, "read"),
    "process": in_daemon(
        lambda bench, agent: serve.serve(agent, "127.0.0.1:0", "/metrics", None), ProcessSeries, "refresh"
    ),
    "textfile": in_daemon(
        lambda bench, agent: serve.write_textfiles(agent, bench.folder / "a.prom", 0.01), Publisher, "body"
    ),
    "web-config": web_config,
    "http-password": http_password,
    "cycle": cycle,
    "lease": keep_lease,
    "slurm-collector": slurm_collector,
    "signal": follow,
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_task_survives_an_error_and_counts_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with contextlib.ExitStack() as stack:
        broken, counted = CASES[name](Bench(monkeypatch, tmp_path, stack))
        wait_for(lambda: broken.calls >= 4 or None, f"turns of {name} after its errors")
        assert counted(name) == 2
    said = [
        each
        for each in caplog.records
        if each.getMessage() == f"one turn of the task {name} failed; the task continues"
    ]
    assert len(said) == 1 and said[0].exc_info


def test_the_simulated_host_survives_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        broken, counted = in_agent(SimulatedHost, "look")(Bench(monkeypatch, tmp_path, stack))
        wait_for(lambda: broken.calls >= 4 or None, "turns of the host after its errors")
        assert counted("host") == 2
