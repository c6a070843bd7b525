"""More jobs, as real hosts have them: servers, engines, notebooks, reinforcement learning; and other forms of the faults."""

from __future__ import annotations

import functools
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Full
from typing import Any

from tests.workloads.parts import FORK, burn, burn_in_threads, set_name, start_loaders, train, write_direct
from tests.workloads.scripts import MIB, Place, script

NOISE = os.urandom(1 << 14)
BURN_A_QUARTER = "import time\nwhile time.process_time() < 0.25: pass"


def _nothing() -> None:
    return None


def _start(run: Callable[..., None], *arguments: Any) -> None:
    """A process beside this one, which ends with it."""
    FORK.Process(target=run, args=arguments, daemon=True).start()


def _compute(seconds: float) -> None:
    """Use this much CPU time outside of the interpreter's lock, as a library does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        zlib.compress(NOISE, 6)


def _write_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        write_direct(path, 32 * MIB)


def _one_cpu() -> set[int]:
    return {max(os.sched_getaffinity(0))}


def _front_end(requests: Any, mean_pause_s: float, cpu_s: float) -> None:
    """HTTP and tokenizing. Requests come at random, whether or not the last one is answered."""
    arrives_at = time.monotonic()
    while True:
        arrives_at += random.expovariate(1 / mean_pause_s)
        time.sleep(max(0.0, arrives_at - time.monotonic()))
        burn(cpu_s)
        requests.put(b"x" * 1000)


def _start_service(delay_s: float, size: int) -> Any:
    """An object store or another service: it answers each request after a while. Returns its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        while connection.recv(1):
            time.sleep(delay_s)
            connection.sendall(bytes(size))

    def serve() -> None:
        while True:
            threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    _start(serve)
    return server.getsockname()


@functools.cache
def _connection(address: Any) -> socket.socket:
    """One for each process, since a loader first asks for it after the fork."""
    return socket.create_connection(address)


def _ask(address: Any, size: int) -> None:
    _connection(address).sendall(b"?")
    _connection(address).recv(size, socket.MSG_WAITALL)


# --- faults


@script("too_few_workers", host_cpus=8, network=True)
def two_loaders_wait_for_an_object_store(place: Place) -> None:
    address = _start_service(0.04, MIB // 4)

    def make() -> None:
        _ask(address, MIB // 4)
        burn(0.004)

    train(place.device, 0.005, start_loaders(2, make).get)


@script("too_few_workers", host_cpus=8)
def files_are_decoded_in_the_loop(place: Place) -> None:
    sample = zlib.compress(os.urandom(3 * MIB).hex().encode(), 1)
    for number in range(4):
        (place.folder / f"sample-{number}").write_bytes(sample)
    train(place.device, 0.008, lambda: zlib.decompress((place.folder / f"sample-{random.randrange(4)}").read_bytes()))


@script("pinned_loaders", host_cpus=8)
def four_loaders_are_bound_to_one_cpu(place: Place) -> None:
    cpu = _one_cpu()

    def make() -> None:
        os.sched_setaffinity(0, cpu)  # a library does so when a loader imports it; to repeat it changes nothing
        burn(0.03)

    train(place.device, 0.008, start_loaders(4, make).get)


@script("pinned_loaders", host_cpus=8)
def a_library_binds_the_job_before_its_loaders_start(place: Place) -> None:
    os.sched_setaffinity(0, _one_cpu())
    train(place.device, 0.004, start_loaders(3, lambda: burn(0.03)).get)


@script("cpu_oversubscribed", quota=1.5)
def each_loader_starts_a_pool_of_threads(place: Place) -> None:
    start_pool = functools.cache(lambda: burn_in_threads(8))  # they spin while they wait for work, as OpenMP's do

    def make() -> None:
        start_pool()
        burn(0.004)

    train(place.device, 0.01, start_loaders(4, make).get)


@script("cpu_work", host_cpus=8)
def the_model_stayed_on_the_cpu(place: Place) -> None:
    place.device.open_context()
    queue = start_loaders(1, lambda: burn(0.004))
    with ThreadPoolExecutor(2) as pool:
        while True:
            queue.get()
            list(pool.map(_compute, (0.03, 0.03)))
            burn(0.02)


@script("cpu_work", host_cpus=8)
def features_are_computed_beside_a_reserved_gpu(place: Place) -> None:
    place.device.open_context()
    queue = start_loaders(1, lambda: burn(0.05), name="")
    with (place.folder / "features").open("wb") as file:
        while True:
            file.write(queue.get())


@script("launch_bound", host_cpus=8)
def many_small_kernels_and_a_full_queue(place: Place) -> None:
    def launch_the_rest(step: int) -> None:
        for _ in range(100):
            burn(1e-4)  # what Python and the framework need for each operator
            place.device.launch(2e-5)

    train(place.device, 2e-5, start_loaders(2, lambda: burn(0.001)).get, launch_the_rest)


@script("checkpointing", seconds=66.0)
def waits_for_a_process_that_saves(place: Place) -> None:
    began = time.monotonic()

    def save(step: int) -> None:
        nonlocal began
        if time.monotonic() - began > 9.0:
            saver = FORK.Process(target=_write_for, args=(place.folder / "checkpoint", 6.0), daemon=True)
            saver.start()
            saver.join()
            began = time.monotonic()

    train(place.device, 0.02, start_loaders(1, lambda: burn(0.002)).get, save)


@script("interactive")
def a_debugger_waits_in_a_terminal(place: Place) -> None:
    pid, _descriptor = pty.fork()
    if pid == 0:  # the shell
        if os.fork() == 0:
            place.device.open_context()
            burn(0.5)
            os.read(0, 1)
        time.sleep(1e6)
    time.sleep(1e6)


@script("unused_gpu", gpus=2, subject=1)
def opens_both_gpus_and_uses_one(place: Place) -> None:
    place.devices[1].open_context()
    train(place.device, 0.02, start_loaders(1, lambda: burn(0.005)).get)


@script("no_process")
def the_engine_ended_and_its_front_end_stays(place: Place) -> None:
    def fail() -> None:
        place.device.open_context()
        time.sleep(1.0)

    engine = FORK.Process(target=fail, daemon=True)
    engine.start()
    engine.join()
    while True:
        burn(0.002)  # answers health checks
        time.sleep(0.5)


@script("starting", is_new=True)
def packages_are_compiled(place: Place) -> None:
    while True:
        compilers = [subprocess.Popen([sys.executable, "-c", BURN_A_QUARTER]) for _ in range(2)]
        for compiler in compilers:
            compiler.wait()
        (place.folder / "object").write_bytes(bytes(MIB))


# --- no fault, and it looks like none


@script(host_cpus=8)
def a_busy_server_of_two_processes(place: Place) -> None:
    requests = FORK.SimpleQueue()
    _start(_front_end, requests, 0.08, 0.04)
    place.device.open_context()
    while True:
        requests.get()
        place.device.launch(0.09)
        time.sleep(0.09)


# --- no fault, and it looks like one


@script(hard=True, host_cpus=8)
def an_api_process_before_an_engine_with_few_requests(place: Place) -> None:
    requests = FORK.SimpleQueue()
    _start(_front_end, requests, 0.18, 0.08)
    place.device.open_context()
    while True:
        requests.get()
        for _ in range(25):  # one token each
            place.device.launch(0.002)
            place.device.synchronize()


@script(hard=True, host_cpus=8)
def an_engine_polls_for_its_few_requests(place: Place) -> None:
    _poll_for_requests(place, 0.2)


@script(hard=True, host_cpus=8)
def a_server_polls_and_has_no_requests_at_night(place: Place) -> None:
    _poll_for_requests(place, 1e6)


def _poll_for_requests(place: Place, pause_s: float) -> None:
    requests = FORK.SimpleQueue()
    _start(_front_end, requests, pause_s, 0.01)
    place.device.open_context()
    while True:
        if not requests.empty():
            requests.get()
            place.device.launch(0.05)
            place.device.synchronize()


@script(hard=True, host_cpus=8)
def molecular_dynamics_on_cpus_with_some_help(place: Place) -> None:
    place.device.open_context()
    with ThreadPoolExecutor(2) as pool:
        while True:
            place.device.launch(0.004)  # some of the forces; the others are computed meanwhile
            list(pool.map(_compute, (0.012, 0.012)))
            time.sleep(0.003)  # other ranks


@script(hard=True, host_cpus=8)
def an_optimizer_on_the_cpu(place: Place) -> None:
    with ThreadPoolExecutor(2) as pool:

        def update(step: int) -> None:  # its state does not fit into the memory of the GPU
            list(pool.map(_compute, (0.02, 0.02)))
            time.sleep(0.004)

        train(place.device, 0.01, start_loaders(1, lambda: burn(0.001)).get, update)


@script(hard=True, host_cpus=8)
def a_notebook_computes_now_and_then(place: Place) -> None:
    if os.fork() == 0:  # the kernel
        place.device.open_context()
        while True:
            burn(0.8)
            for _ in range(40):
                place.device.launch(0.01)
            place.device.synchronize()
            time.sleep(1.5)
    set_name("jupyter-lab")
    time.sleep(1e6)


@script(hard=True, host_cpus=8)
def cheap_environments_answer_the_policy(place: Place) -> None:
    def play(pipe: Any) -> None:
        while True:
            pipe.recv_bytes()
            burn(0.0005)
            time.sleep(0.004)  # the simulator has its own clock
            pipe.send_bytes(b"x" * 1000)

    ends = [FORK.Pipe() for _ in range(4)]
    for _, theirs in ends:
        _start(play, theirs)
    place.device.open_context()
    while True:
        for ours, _ in ends:
            ours.send_bytes(b"action")
        for ours, _ in ends:
            ours.recv_bytes()
        place.device.launch(0.002)
        place.device.synchronize()


@script(hard=True, host_cpus=8)
def unit_tests_reward_the_answers(place: Place) -> None:
    place.device.open_context()
    while True:
        place.device.launch(0.2)
        time.sleep(0.2)
        tests = [subprocess.Popen([sys.executable, "-c", BURN_A_QUARTER]) for _ in range(2)]
        for test in tests:
            test.wait()


@script(hard=True, host_cpus=8)
def a_tokenizer_prepares_the_next_data_set(place: Place) -> None:
    def tokenize() -> None:
        while True:
            burn(1.0)

    _start(tokenize)
    queue = start_loaders(1, lambda: burn(0.002))
    train(place.device, 0.01, queue.get, lambda step: time.sleep(0.025))  # other ranks


@script(hard=True)
def idle_loaders_while_peers_are_late(place: Place) -> None:
    train(place.device, 0.01, start_loaders(2, lambda: burn(0.01)).get, lambda step: time.sleep(0.04))


@script(hard=True, host_cpus=8)
def a_loader_polls_a_full_queue(place: Place) -> None:
    def load(queue: Any) -> None:
        set_name("pt_data_worker")
        while True:
            burn(0.002)
            while queue.full():
                pass
            queue.put(b"x" * 1000)

    queue = FORK.Queue(maxsize=4)
    _start(load, queue)
    train(place.device, 0.01, queue.get, lambda step: time.sleep(0.03))  # other ranks


@script(hard=True, host_cpus=8)
def an_evaluation_between_the_steps(place: Place) -> None:
    def evaluate(step: int) -> None:
        if step % 50 == 0:
            burn(2.0)

    train(place.device, 0.02, start_loaders(2, lambda: burn(0.005)).get, evaluate)


@script(hard=True, host_cpus=8)
def boxes_are_matched_on_the_cpu_in_each_step(place: Place) -> None:
    train(place.device, 0.01, start_loaders(2, lambda: burn(0.004)).get, lambda step: burn(0.03))


@script(hard=True, host_cpus=8, quota=1.0)
def data_are_unpacked_in_bursts_above_the_quota(place: Place) -> None:
    def unpack() -> None:
        while True:
            time.sleep(0.53 - time.monotonic() % 0.53)  # at no fixed place within the periods of the quota
            burn(0.05)

    for _ in range(3):
        _start(unpack)
    train(place.device, 0.01, _nothing, lambda step: time.sleep(0.03))  # other ranks


@script(hard=True, network=True, host_cpus=8)
def waits_for_a_judge_elsewhere(place: Place) -> None:
    address = _start_service(0.06, 4096)
    train(place.device, 0.02, _nothing, lambda step: _ask(address, 4096))


@script(hard=True, host_cpus=8)
def results_go_to_a_slow_receiver(place: Place) -> None:
    def send(results: Any) -> None:
        while True:
            results.get()
            burn(0.015)
            time.sleep(0.03)  # until the receiver takes the next one

    results = FORK.Queue(maxsize=4)
    _start(send, results)
    train(place.device, 0.01, _nothing, lambda step: results.put(b"x" * 1000))


@script(hard=True, seconds=66.0)
def results_are_written_while_no_input_is_there(place: Place) -> None:
    place.device.open_context()
    while True:
        for _ in range(150):
            place.device.launch(0.02)
            place.device.synchronize()
        threading.Thread(target=_write_for, args=(place.folder / "results", 5.0), daemon=True).start()
        time.sleep(9.0)  # until somebody sends the next file


@script(hard=True, host_cpus=8)
def cameras_set_the_pace(place: Place) -> None:
    def decode(frames: Any) -> None:
        while True:
            time.sleep(0.04 - time.monotonic() % 0.04)
            burn(0.018)
            try:
                frames.put(b"x" * 1000, block=False)
            except Full:
                continue

    frames = FORK.Queue(maxsize=4)
    for _ in range(2):
        _start(decode, frames)
    place.device.open_context()
    while True:
        frames.get()
        place.device.launch(0.006)
        place.device.synchronize()
