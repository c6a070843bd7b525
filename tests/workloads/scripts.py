"""Small jobs with one known fault each, jobs without a fault, and pairs of faults.

Each function is one job. It runs until it is ended, in a cgroup of its own. `truth` is what is wrong with it. A job is
`hard` if it is healthy and looks faulty: its GPU has little to do for a reason that its owner wants.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.workloads.device import SimulatedDevice
from tests.workloads.parts import (
    burn,
    burn_in_threads,
    read_direct,
    set_name,
    start_loaders,
    train,
    write_direct,
)

MIB = 1 << 20
OF_LOOPS = {
    *("cpu_quota", "cpu_oversubscribed", "cpu_bound_input", "too_few_workers", "small_file_io", "checkpointing"),
    *("pinned_loaders", "launch_bound"),
}
HARD_LOOPS = {
    "two_loaders_keep_up",
    "uneven_batches",
    "an_evaluation_on_the_cpu",
    "actors_of_reinforcement_learning",
    "a_compiler_beside_a_waiting_process",
    "a_small_model_waits_for_its_peers",
    "one_loader_at_ninety_percent_with_a_full_queue",
    "an_optimizer_on_the_cpu",
    "a_tokenizer_prepares_the_next_data_set",
    "idle_loaders_while_peers_are_late",
    "a_loader_polls_a_full_queue",
    "an_evaluation_between_the_steps",
    "boxes_are_matched_on_the_cpu_in_each_step",
    "data_are_unpacked_in_bursts_above_the_quota",
    "waits_for_a_judge_elsewhere",
    "results_go_to_a_slow_receiver",
}


class Place(NamedTuple):
    """Where a job runs. `devices`: its GPUs. `folder`: on a disk, for its data."""

    devices: tuple[SimulatedDevice, ...]
    folder: Path

    @property
    def device(self) -> SimulatedDevice:
        return self.devices[0]


class Script(NamedTuple):
    """One job. `quota`: CPUs. `memory`, `shm`: bytes. `subject`: the GPU that is judged. `gpus`: how many it holds.
    `cpu`: the one CPU that it may use. `host_cpus`: of the host that it is part of; more than this machine has where
    the job uses so little that it would do the same there. `files`: the right to trace is given.
    """

    run: Callable[[Place], None]
    truth: frozenset[str]
    hard: bool = False
    quota: float | None = None
    memory: int | None = None
    shm: int | None = None
    network: bool = False
    subject: int = 0
    gpus: int = 1
    cpu: int | None = None
    host_cpus: int = 2
    files: bool = False
    seconds: float = 32.0
    is_new: bool = False

    @property
    def hook(self) -> bool:
        """Whether it is run with the hook too: its loop trains, and its GPU is not used well or looks so."""
        return self.gpus == 1 and (bool(self.truth & OF_LOOPS) or self.name in HARD_LOOPS)

    @property
    def name(self) -> str:
        return self.run.__name__


SCRIPTS: list[Script] = []


def script(*truth: str, **options: object) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a job."""

    def register(run: Callable[[Place], None]) -> Callable[[Place], None]:
        SCRIPTS.append(Script(run, frozenset(truth), **options))  # type: ignore[arg-type]
        return run

    return register


def _nothing() -> None:
    return None


# --- faults


@script("no_process")
def training_ended_and_the_job_sleeps(place: Place) -> None:
    time.sleep(1e6)


@script("no_process")
def job_computes_on_cpus_only(place: Place) -> None:
    while True:
        burn(0.1)


@script("unused_gpu", gpus=2, subject=1)
def one_process_on_two_gpus(place: Place) -> None:
    train(place.device, 0.02, _nothing)


@script("starting", is_new=True)
def packages_are_installed(place: Place) -> None:
    for number in itertools.count():
        burn(0.05)
        (place.folder / str(number % 50)).write_bytes(os.urandom(4096))


@script("starting", is_new=True, network=True)
def a_data_set_is_downloaded(place: Place) -> None:
    _send_to_self(pause_s=0.02, size=4 * MIB)


@script("cpu_quota", quota=0.5)
def preprocessing_in_the_loop_under_half_a_cpu(place: Place) -> None:
    train(place.device, 0.02, lambda: burn(0.02))


@script("cpu_quota", quota=0.8)
def two_threads_under_a_small_quota(place: Place) -> None:
    burn_in_threads(2)
    train(place.device, 0.01, lambda: burn(0.01))


@script("cpu_oversubscribed", quota=0.5)
def sixteen_threads_on_half_a_cpu(place: Place) -> None:
    burn_in_threads(16)
    train(place.device, 0.01, lambda: burn(0.002))


@script("cpu_oversubscribed", quota=1.0)
def twenty_four_loaders_on_one_cpu(place: Place) -> None:
    train(place.device, 0.01, start_loaders(24, lambda: burn(0.05)).get)


@script("cpu_oversubscribed")
def thirty_two_threads_on_the_whole_host(place: Place) -> None:
    burn_in_threads(32)
    train(place.device, 0.01, lambda: burn(0.002))


@script("cpu_bound_input", quota=1.0)
def three_loaders_share_one_cpu(place: Place) -> None:
    train(place.device, 0.005, start_loaders(3, lambda: burn(0.05)).get)


@script("cpu_bound_input")
def loaders_use_the_whole_host(place: Place) -> None:
    train(place.device, 0.004, start_loaders(2, lambda: burn(0.05)).get)


@script("cpu_bound_input", quota=1.2)
def unnamed_loaders_share_the_quota(place: Place) -> None:
    train(place.device, 0.004, start_loaders(3, lambda: burn(0.04), name="").get)


@script("too_few_workers", host_cpus=8)
def one_loader_cannot_keep_up(place: Place) -> None:
    train(place.device, 0.01, start_loaders(1, lambda: burn(0.05)).get)


@script("too_few_workers", host_cpus=8)
def one_unnamed_loader_cannot_keep_up(place: Place) -> None:
    train(place.device, 0.008, start_loaders(1, lambda: burn(0.04), name="").get)


@script("too_few_workers", host_cpus=8)
def samples_are_made_in_the_loop(place: Place) -> None:
    train(place.device, 0.01, lambda: burn(0.03))


@script("too_few_workers", host_cpus=8)
def samples_are_read_in_the_loop(place: Place) -> None:
    data = place.folder / "data"
    write_direct(data, 2 * MIB)

    def get() -> None:
        read_direct(data, MIB)
        burn(0.03)

    train(place.device, 0.01, get)


@script("memory_pressure", memory=48 * MIB)
def mapped_data_do_not_fit(place: Place) -> None:
    data = place.folder / "data"
    write_direct(data, 160 * MIB)
    with data.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)

        def get() -> None:
            for _ in range(80):
                _ = pages[random.randrange(len(pages))]

        train(place.device, 0.002, get)


@script("memory_pressure", memory=96 * MIB)
def loaders_are_killed_for_memory(place: Place) -> None:
    def grow() -> None:
        kept = []
        while True:
            kept.append(bytearray(os.urandom(4 * MIB)))
            time.sleep(0.02)

    def restart() -> None:
        while True:
            pid = os.fork()
            if pid == 0:
                Path("/proc/self/oom_score_adj").write_text("1000")
                grow()
            os.waitpid(pid, 0)

    threading.Thread(target=restart, daemon=True).start()
    train(place.device, 0.01, lambda: time.sleep(0.05))


@script("shm_full", shm=16 * MIB)
def loaders_fill_the_shared_memory(place: Place) -> None:
    Path("/dev/shm/samples").write_bytes(bytes(int(15.5 * MIB)))
    train(place.device, 0.01, lambda: time.sleep(0.05))


@script("far_numa", cpu=0)
def bound_to_the_other_socket(place: Place) -> None:
    train(place.device, 0.01, lambda: time.sleep(0.03))


@script("checkpointing", seconds=66.0)
def every_quarter_of_a_minute_a_checkpoint(place: Place) -> None:
    began = time.monotonic()

    def save(step: int) -> None:
        nonlocal began
        if time.monotonic() - began > 9.0:
            until = time.monotonic() + 6.0
            while time.monotonic() < until:
                write_direct(place.folder / "checkpoint", 32 * MIB)
            began = time.monotonic()

    train(place.device, 0.02, _nothing, save)


@script("checkpointing", network=True, seconds=66.0)
def checkpoints_go_over_the_network(place: Place) -> None:
    began = time.monotonic()

    def save(step: int) -> None:
        nonlocal began
        if time.monotonic() - began > 9.0:
            _send_away(seconds=6.0)
            began = time.monotonic()

    train(place.device, 0.02, _nothing, save)


@script("interactive")
def a_shell_with_a_context(place: Place) -> None:
    def hold(_: int = 0) -> bytes:
        return b""

    pid, _descriptor = pty.fork()
    if pid == 0:
        place.device.open_context()
        time.sleep(1e6)
    time.sleep(1e6)


@script("interactive")
def a_notebook_waits_for_its_user(place: Place) -> None:
    if os.fork() == 0:
        place.device.open_context()
        time.sleep(1e6)
    set_name("jupyter-lab")
    time.sleep(1e6)


@script("small_file_io", host_cpus=8, files=True)
def loaders_read_small_files(place: Place) -> None:
    for number in range(500):
        (place.folder / f"sample-{number}").write_bytes(os.urandom(4096))

    def make() -> None:
        for number in range(60):
            (place.folder / f"sample-{number}").read_bytes()
        time.sleep(0.02)

    train(place.device, 0.004, start_loaders(2, make).get)


@script("too_few_workers", "far_numa", host_cpus=8, cpu=0)
def one_loader_and_the_other_socket(place: Place) -> None:
    train(place.device, 0.006, start_loaders(1, lambda: burn(0.05)).get)


@script("cpu_oversubscribed", "shm_full", quota=0.5, shm=16 * MIB)
def many_threads_and_full_shared_memory(place: Place) -> None:
    Path("/dev/shm/samples").write_bytes(bytes(int(15.5 * MIB)))
    burn_in_threads(12)
    train(place.device, 0.01, lambda: burn(0.002))


# --- no fault, and it looks like none


@script()
def two_loaders_keep_up(place: Place) -> None:
    train(place.device, 0.05, start_loaders(2, lambda: burn(0.01)).get)


@script()
def samples_are_in_memory(place: Place) -> None:
    train(place.device, 0.02, _nothing)


@script(quota=1.6)
def four_light_loaders_under_a_quota(place: Place) -> None:
    train(place.device, 0.05, start_loaders(4, lambda: burn(0.003)).get)


@script(gpus=2)
def two_ranks(place: Place) -> None:
    if os.fork() == 0:
        train(place.devices[1], 0.05, lambda: time.sleep(0.005))
    train(place.device, 0.05, lambda: time.sleep(0.005))


@script()
def all_data_first_then_steps(place: Place) -> None:
    burn(1.0)
    train(place.device, 0.1, _nothing)


@script()
def unnamed_loaders_keep_up(place: Place) -> None:
    train(place.device, 0.05, start_loaders(2, lambda: burn(0.01), name="").get)


@script()
def a_logger_beside_it(place: Place) -> None:
    def log() -> None:
        while True:
            burn(0.02)
            time.sleep(0.2)

    threading.Thread(target=log, daemon=True).start()
    train(place.device, 0.05, lambda: time.sleep(0.005))


@script()
def background_checkpoints(place: Place) -> None:
    def save() -> None:
        while True:
            write_direct(place.folder / "checkpoint", 64 * MIB)
            time.sleep(5.0)

    threading.Thread(target=save, daemon=True).start()
    train(place.device, 0.05, _nothing)


# --- no fault, and it looks like one


@script(hard=True)
def a_server_with_few_requests(place: Place) -> None:
    train(place.device, 0.01, lambda: time.sleep(random.uniform(0.01, 0.08)))


@script(hard=True, quota=1.0)
def nearly_all_of_the_quota_and_keeps_up(place: Place) -> None:
    queue = start_loaders(2, lambda: burn(0.01))
    device = place.device
    device.open_context()
    while True:  # it does not spin: the wait is blocking
        queue.get()
        device.launch(0.05)
        time.sleep(0.05)


@script(hard=True)
def one_loader_at_ninety_percent_with_a_full_queue(place: Place) -> None:
    device, queue = place.device, start_loaders(1, lambda: burn(0.043))
    device.open_context()
    while True:
        queue.get()
        device.launch(0.05)
        time.sleep(0.05)


@script(hard=True)
def uneven_batches(place: Place) -> None:
    sizes = itertools.cycle((0.002, 0.03, 0.005))
    place.device.open_context()
    while True:
        place.device.launch(next(sizes))
        place.device.synchronize()
        time.sleep(0.03)  # the other ranks are still at work


@script(hard=True, host_cpus=8)
def an_evaluation_on_the_cpu(place: Place) -> None:
    train(place.device, 0.01, _nothing, lambda _: burn(0.05))


@script(hard=True, memory=48 * MIB)
def the_page_cache_fills_the_limit(place: Place) -> None:
    data = place.folder / "data"
    write_direct(data, 160 * MIB)

    def get() -> None:
        with data.open("rb") as file:
            file.seek(random.randrange(150) * MIB)
            file.read(4 * MIB)
        time.sleep(0.02)

    train(place.device, 0.01, get)


@script(hard=True)
def sixty_four_threads_that_sleep(place: Place) -> None:
    for _ in range(64):
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    train(place.device, 0.01, lambda: time.sleep(0.03))


@script(hard=True, seconds=66.0)
def bursts_of_writes_that_cost_nothing(place: Place) -> None:
    def save() -> None:
        while True:
            time.sleep(9.0)
            until = time.monotonic() + 6.0
            while time.monotonic() < until:
                write_direct(place.folder / "checkpoint", 32 * MIB)

    threading.Thread(target=save, daemon=True).start()
    train(place.device, 0.02, lambda: time.sleep(0.03))


@script(hard=True, quota=1.0)
def actors_of_reinforcement_learning(place: Place) -> None:
    train(place.device, 0.005, start_loaders(3, lambda: burn(0.05), name="actor").get)


@script(hard=True, host_cpus=8)
def a_compiler_beside_a_waiting_process(place: Place) -> None:
    def compile_kernels() -> None:
        while True:
            burn(1.0)

    if os.fork() == 0:
        compile_kernels()
    train(place.device, 0.005, _nothing, lambda _: time.sleep(0.5))


@script("too_few_workers", host_cpus=8)
def one_loader_at_half_a_cpu(place: Place) -> None:
    def make() -> None:
        burn(0.02)
        time.sleep(0.02)

    train(place.device, 0.008, start_loaders(1, make).get)


@script(hard=True, network=True)
def a_small_model_waits_for_its_peers(place: Place) -> None:
    threading.Thread(target=_send_to_self, kwargs={"pause_s": 0.1, "size": MIB}, daemon=True).start()
    train(place.device, 0.01, _nothing, lambda _: time.sleep(0.04))


@script(hard=True)
def a_hyperparameter_search_starts_small_processes(place: Place) -> None:
    place.device.open_context()
    while True:
        subprocess.run([sys.executable, "-c", "pass"], check=False)
        place.device.launch(0.01)
        time.sleep(0.1)


def _send_away(seconds: float) -> None:
    """Some 100 MB/s to a neighbour that does not exist."""
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        while time.monotonic() < until:
            for _ in range(20):
                client.sendto(bytes(60_000), ("10.9.9.2", 9))
            time.sleep(0.01)


def _send_to_self(pause_s: float, size: int, seconds: float = 1e6) -> None:
    """Traffic in the job's own network namespace, to itself."""
    server = socket.create_server(("127.0.0.1", 0))

    def receive() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            while connection.recv(MIB):
                pass

    threading.Thread(target=receive, daemon=True).start()
    until = time.monotonic() + seconds
    with socket.create_connection(server.getsockname()) as client:
        while time.monotonic() < until:
            client.sendall(bytes(size))
            time.sleep(pause_s)
    server.close()


from tests.workloads import more_scripts as more_scripts  # noqa: E402  -- it registers with the decorator above
