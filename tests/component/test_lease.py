"""Several reconcilers on a real API server: one writes, and another takes over when the Lease is no longer renewed."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from kubernetes import client

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.apply import withdraw_all
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.client.lease import LEASE_S, RENEW_DEADLINE_S, Lease, LeasePause
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.pause import UNTIL, PauseNote, PauseUnreadable
from gpu_exporter.reconciler.runtime.loops import remove_all
from tests.component.pods_bench import Bench, metrics_of_an_idle_pod
from tests.testbed.clocks import StoppableClock
from tests.testbed.control_plane import ControlPlane
from tests.testbed.pages import is_served, serve_page
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, free_port, run_exporter, wait_for

pytestmark = pytest.mark.kubernetes


class Replicas:
    """Two processes with separate clocks, and their Lease."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.api = client.CoordinationV1Api(plane.api)
        self.name = name
        self.clocks = StoppableClock(), StoppableClock()
        self.a, self.b = (
            Lease(Api(ControlPlane.connect(plane.admin)), "default", name, clock, identity)
            for clock, identity in zip(self.clocks, "ab", strict=True)
        )

    def tick(self, *leases: Lease) -> tuple[bool, bool]:
        """Let these replicas look at the Lease. Returns for both whether they may write."""
        for lease in leases:
            lease.tick()
        return self.a.may_write(), self.b.may_write()

    def pass_time(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.later += seconds

    def spec(self) -> client.V1LeaseSpec:
        return self.api.read_namespaced_lease(self.name, "default").spec


@pytest.fixture
def replicas(plane: ControlPlane, request: pytest.FixtureRequest) -> Replicas:
    return Replicas(plane, request.node.name.replace("_", "-")[:60].strip("-"))


def test_another_replica_takes_the_lease_only_after_it_expires(replicas: Replicas) -> None:
    assert replicas.tick(replicas.a, replicas.b) == (True, False)
    assert (replicas.spec().holder_identity, replicas.spec().lease_transitions) == ("a", 0)
    for _ in range(3):
        replicas.pass_time(RENEW_DEADLINE_S - 1)
        assert replicas.tick(replicas.a, replicas.b) == (True, False), "a renews"
    replicas.pass_time(LEASE_S - 0.5)
    assert replicas.tick(replicas.b) == (False, False), "no replica may write until the other may take the Lease"
    replicas.pass_time(0.6)
    assert replicas.tick(replicas.b) == (False, True)
    assert (replicas.spec().holder_identity, replicas.spec().lease_transitions) == ("b", 1)
    assert replicas.tick(replicas.a, replicas.b) == (False, True)
    assert replicas.tick(replicas.a) == (False, True)


def test_a_stopped_holder_may_not_write_when_it_continues(replicas: Replicas) -> None:
    assert replicas.tick(replicas.a) == (True, False)
    replicas.clocks[0].later += RENEW_DEADLINE_S - 0.5
    assert replicas.a.may_write()
    replicas.clocks[0].later += 0.5
    assert not replicas.a.may_write()
    assert replicas.tick(replicas.a) == (True, False), "the other replica has not taken the Lease meanwhile"


def test_the_other_replica_takes_a_released_lease_at_once(replicas: Replicas) -> None:
    assert replicas.tick(replicas.a, replicas.b) == (True, False)
    replicas.a.release()
    assert replicas.tick() == (False, False)
    assert replicas.tick(replicas.b) == (False, True)
    assert replicas.spec().holder_identity == "b"
    replicas.a.release()
    assert replicas.spec().holder_identity == "b"


def test_the_holder_loses_an_edited_or_deleted_lease_and_reads_it_again(replicas: Replicas) -> None:
    assert replicas.tick(replicas.a) == (True, False)
    other = {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 15}}
    replicas.api.patch_namespaced_lease(replicas.name, "default", other)
    assert replicas.tick(replicas.a) == (False, False)
    assert replicas.tick(replicas.a) == (False, False)
    replicas.pass_time(LEASE_S)
    assert replicas.tick(replicas.a) == (True, False)
    replicas.api.delete_namespaced_lease(replicas.name, "default")
    assert replicas.tick(replicas.a) == (False, False)
    assert replicas.tick(replicas.b, replicas.a) == (False, True)


def test_every_replica_sees_a_pause_on_the_lease_and_the_pause_remains(replicas: Replicas, plane: ControlPlane) -> None:
    place = LeasePause(Api(ControlPlane.connect(plane.admin)), "default", replicas.name)
    assert place.read_pause() is None
    asked = PauseNote(2e9, "storage is being moved")
    place.write_pause(asked)  # before any replica holds the Lease
    assert replicas.tick(replicas.a, replicas.b) == (True, False)
    assert replicas.a.read_pause() == asked
    assert replicas.b.read_pause() == asked
    longer = PauseNote(3e9, "")
    place.write_pause(longer)
    assert replicas.tick(replicas.a, replicas.a) == (True, False), "one renewal is lost to it"
    assert (replicas.a.read_pause(), place.read_pause()) == (longer, longer)
    assert replicas.tick(replicas.b) == (True, False)
    replicas.api.delete_namespaced_lease(replicas.name, "default")
    assert replicas.tick(replicas.a, replicas.b) == (False, True), "the other one is quicker"
    assert (place.read_pause(), replicas.b.read_pause()) == (longer, longer)
    replicas.b.release()
    assert replicas.tick(replicas.a) == (True, False)
    replicas.api.delete_namespaced_lease(replicas.name, "default")
    assert replicas.tick(replicas.a, replicas.a) == (True, False)
    assert place.read_pause() == longer
    assert replicas.a.read_pause() == longer
    body = {"metadata": {"annotations": {UNTIL: "soon"}}}
    replicas.api.patch_namespaced_lease(replicas.name, "default", body)
    assert replicas.tick(replicas.a, replicas.a) == (True, False)
    for each in (replicas.a, place):
        with pytest.raises(PauseUnreadable, match=f"Lease default/{replicas.name}: .*'soon' is not a valid timestamp"):
            each.read_pause()


def test_only_the_current_holder_writes_a_text_and_the_next_holder_reads_it(replicas: Replicas) -> None:
    replicas.tick(replicas.a, replicas.b)
    replicas.a.write_text("journal", "first")
    assert replicas.a.read_text("journal") == "first"
    with pytest.raises(MarkError, match="does not hold the Lease") as caught:
        replicas.b.write_text("journal", "second")
    assert caught.value.result == "fenced"
    replicas.pass_time(RENEW_DEADLINE_S)
    with pytest.raises(MarkError, match="does not hold the Lease"):
        replicas.a.write_text("journal", "late")
    replicas.a.release()
    replicas.tick(replicas.b)
    assert replicas.b.read_text("journal") == "first"
    replicas.b.write_text("journal", "second")
    assert replicas.tick(replicas.b) == (False, True), "a text is written with a renewal"
    assert replicas.b.read_text("journal") == "second"


def test_writing_a_text_keeps_a_pause_that_was_written_meanwhile(plane: ControlPlane, replicas: Replicas) -> None:
    replicas.tick(replicas.a)
    place = LeasePause(Api(ControlPlane.connect(plane.admin)), "default", replicas.name)
    place.write_pause(PauseNote(time.time() + 600.0, "storage is moved"))
    replicas.a.write_text("journal", "first")
    note = replicas.a.read_pause()
    assert note is not None and note.reason == "storage is moved"
    assert replicas.api.read_namespaced_lease(replicas.name, "default").metadata.annotations[UNTIL]


def test_a_renewal_that_arrived_after_its_timeout_costs_only_one_try(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replicas.tick(replicas.a) == (True, False)
    put = replicas.a._put

    def answer_late(lease: dict[str, object]) -> dict[str, object]:
        put(dict(lease))
        raise TimeoutError

    monkeypatch.setattr(replicas.a, "_put", answer_late)
    assert replicas.tick(replicas.a) == (True, False), "the last renewal is young"
    monkeypatch.undo()
    assert replicas.tick(replicas.a, replicas.b) == (False, False), "a conflict with itself"
    assert replicas.tick(replicas.b, replicas.a) == (True, False)


def test_a_holder_without_an_api_server_stops_writing_in_time(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StoppableClock()
    lease = Lease(Api(ControlPlane.connect(plane.admin)), "default", "partition", clock, "a")
    lease.tick()
    assert lease.may_write()
    settings = client.Configuration()
    settings.host, settings.retries = f"https://127.0.0.1:{free_port()}", False
    lease._api = Api(client.ApiClient(settings))
    for seconds, may_write in ((4.0, True), (4.0, True), (2.0, False)):
        clock.later += seconds
        lease.tick()
        assert lease.may_write() is may_write
    assert caplog.text.count("lease default/partition: API server: ") == 1, "logged once"
    assert "the reconciler needs `get` and `update` on this Lease, and `create` on leases" in caplog.text


def test_a_replica_waits_only_until_the_lease_is_taken(replicas: Replicas) -> None:
    began = time.monotonic()
    stop = threading.Event()
    replicas.a.keep(stop)
    try:
        assert replicas.a.wait(60.0)
        assert time.monotonic() - began < 30.0
        assert not replicas.b.wait(0.1)
    finally:
        stop.set()


def test_two_reconcilers_take_turns_and_mark_each_pod_once(plane: ControlPlane, tmp_path: Path) -> None:
    """The first process is stopped and continued. It takes over when the second process is killed."""
    bench = Bench(plane, "two-reconcilers")
    uids = {name: bench.run_pod(name, started_s_ago=20000.0) for name in ("one", "two", "three")}
    shown = ["one"]
    with (
        serve_page(
            lambda: "".join(metrics_of_an_idle_pod(bench.namespace, each, uids[each]) for each in shown)
        ) as page,
        Processes(tmp_path) as processes,
    ):

        def start() -> tuple[Running, str]:
            command = ["reconcile", "--apply", f"--source.exporter={page}", "--no-slurm", "--interval=1s"]
            access = [f"--kubernetes.kubeconfig={plane.admin}", f"--kubernetes.lease={bench.namespace}/reconciler"]
            port = f"127.0.0.1:{free_port()}"
            running = processes.start([*GPU_EXPORTER, *command, *access, f"--web.listen-address={port}"])
            return running, f"http://{port}/metrics"

        def wait_for_mark(name: str) -> None:
            wait_for(lambda: bench.labels(name).get(LABEL) or None, f"{name} to be marked")

        def wait_for_role(own: str, leads: int) -> None:
            sample = f"\ngpu_reconciler_leader {leads}.0\n"
            wait_for(lambda: is_served(own, sample), f"gpu_reconciler_leader to be {leads}")

        first, first_page = start()
        wait_for_mark("one")
        wait_for_role(first_page, 1)
        second, second_page = start()
        wait_for_role(second_page, 0)
        assert is_served(second_page, '\ngpu_reconciler_labelled{stage="underused"} 0.0\n'), "the first says it"
        first.process.send_signal(signal.SIGSTOP)
        shown.append("two")
        wait_for_mark("two")
        wait_for_role(second_page, 1)
        first.process.send_signal(signal.SIGCONT)
        wait_for_role(first_page, 0)
        second.process.kill()
        asking = ["pause", f"--kubernetes.kubeconfig={plane.admin}", f"--kubernetes.lease={bench.namespace}/reconciler"]
        assert run_exporter(*asking, "--for=1h", "--reason=storage").returncode == 0
        shown.append("three")
        frozen = '\ngpu_reconciler_frozen{reason="paused"} 1.0\n'
        wait_for(lambda: is_served(first_page, frozen), "the pause to hold")
        assert LABEL not in bench.labels("three")
        assert ": storage" in run_exporter(*asking).stdout
        dry = ["reconcile", "--once", f"--source.exporter={page}", "--no-slurm", *asking[1:]]
        assert "idle for 3.0 h, but a pause of the reconciler is active" in run_exporter(*dry).stdout
        lease = client.CoordinationV1Api(plane.api)
        forget = {"metadata": {"annotations": {UNTIL: None}}}  # the end of a pause would require another idle hour
        lease.patch_namespaced_lease("reconciler", bench.namespace, forget)
        wait_for_mark("three")
        wait_for_role(first_page, 1)
    reasons = {name: [reason for reason, _ in bench.events(name)] for name in uids}
    assert reasons == {name: ["GpuUnderused"] for name in uids}, "each is marked once, with one Event"


def test_marks_are_removed_only_after_the_reconciler_has_ended(plane: ControlPlane, tmp_path: Path) -> None:
    """Helm removes the Deployment and starts the cleanup job, while the pod of the reconciler still runs."""
    bench = Bench(plane, "removed-after-the-end")
    uid = bench.run_pod("one", started_s_ago=20000.0)
    place = f"{bench.namespace}/reconciler"
    access = [f"--kubernetes.kubeconfig={plane.admin}", f"--kubernetes.lease={place}", "--no-slurm"]
    removal = [*GPU_EXPORTER, "reconcile", "--remove-all", "--apply", *access]
    leases = client.CoordinationV1Api(plane.api)
    with (
        serve_page(lambda: metrics_of_an_idle_pod(bench.namespace, "one", uid)) as page,
        Processes(tmp_path) as processes,
    ):
        command = ["reconcile", "--apply", f"--source.exporter={page}", "--interval=1s", *access]
        reconciler = processes.start([*GPU_EXPORTER, *command])
        wait_for(lambda: bench.labels("one").get(LABEL) or None, "the mark")
        holder = leases.read_namespaced_lease("reconciler", bench.namespace).spec.holder_identity
        cleanup = processes.start(removal)
        wait_for(lambda: "waiting at most 45 s for the Lease: " in cleanup.log(), "the wait for the Lease")
        assert f"{holder} holds Lease {place}\n" in cleanup.log()
        assert bench.labels("one").get(LABEL) == "underused"
        assert cleanup.process.poll() is None
        reconciler.process.terminate()
        assert cleanup.process.wait(60) == 0, cleanup.log()
        assert f"{bench.namespace}/one: underused: withdrawn" in cleanup.log()
    assert LABEL not in bench.labels("one")
    assert leases.read_namespaced_lease("reconciler", bench.namespace).spec.holder_identity == "", "given back"


def test_no_mark_is_removed_while_another_reconciler_renews_its_lease(
    plane: ControlPlane, replicas: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(plane, "not-removed")
    bench.run_pod("one", labels={LABEL: "underused"})
    stop = threading.Event()
    replicas.a.keep(stop)
    try:
        assert replicas.a.wait(60.0)
        with pytest.raises(MarkError, match=f"no mark was removed: a holds Lease default/{replicas.name}; stop "):
            remove_all([bench.marker], apply=True, lease=replicas.b, patience_s=1.0)
    finally:
        stop.set()
    assert capsys.readouterr().out == ""
    assert bench.labels("one").get(LABEL) == "underused"


def test_a_removal_stops_where_its_lease_is_lost(plane: ControlPlane, replicas: Replicas) -> None:
    bench = Bench(plane, "lost-while-removing")
    for name in ("one", "two"):
        bench.run_pod(name, labels={LABEL: "underused"})
    replicas.tick(replicas.a)
    said = []
    for each in withdraw_all([bench.marker], SYSTEM_CLOCK, apply=True, may_write=replicas.a.may_write):
        said.append((each.outcome, each.is_done))
        replicas.pass_time(RENEW_DEADLINE_S)
    # Marks of other tests may be in the list.
    assert said[0] == ("withdrawn", True)
    assert set(said[1:]) == {("not withdrawn: another reconciler may hold the Lease", False)}
    assert any(LABEL in bench.labels(name) for name in ("one", "two"))
