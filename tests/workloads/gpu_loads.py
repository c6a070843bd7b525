"""Loads of known nature on a real GPU, for `make gpu-check`. Needs torch and a GPU.

python -m tests.workloads.gpu_loads KIND SECONDS

Prints `ready` when the load begins, and at its end the share of the time with a kernel, or `null` if it is not known.
Kernel time is measured on the device, by events around each batch, so that the truth does not rest on sleeping well.
"""

from __future__ import annotations

import array
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PERIOD_S = 1.0
SIZE = 2048
SHARES = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 1.0)
Load = Callable[[Any, float], float | None]


def say_ready(torch: Any) -> float:
    torch.cuda.synchronize()
    print("ready", flush=True)
    return time.perf_counter()


def kernels(share: float) -> Load:
    """Matrix products for `share` of each period; the share of time with a kernel, by the device's own clock."""

    def run(torch: Any, seconds: float) -> float:
        a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
        torch.mm(a, a)
        begin, busy_s = say_ready(torch), 0.0
        while (now := time.perf_counter()) - begin < seconds:
            while time.perf_counter() - now < share * PERIOD_S:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(16):
                    torch.mm(a, a)
                end.record()
                end.synchronize()
                busy_s += start.elapsed_time(end) / 1e3  # milliseconds
            time.sleep(max(0.0, PERIOD_S - (time.perf_counter() - now)))
        return busy_s / (time.perf_counter() - begin)

    return run


def copies(torch: Any, seconds: float) -> float:
    """Copies from pinned memory, no kernel."""
    host = torch.empty(256 * 1024**2, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    begin = say_ready(torch)
    while time.perf_counter() - begin < seconds:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return 0.0


def context(torch: Any, seconds: float) -> float:
    """A process that holds memory and does nothing, as a notebook at night."""
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    say_ready(torch)
    time.sleep(seconds)
    del held
    return 0.0


def rare(products: int) -> Load:
    """Some short kernels every two seconds, as a server with few requests: work, never idleness."""

    def run(torch: Any, seconds: float) -> float:
        a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
        torch.mm(a, a)
        begin, busy_s = say_ready(torch), 0.0
        while time.perf_counter() - begin < seconds:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(products):
                torch.mm(a, a)
            end.record()
            end.synchronize()
            busy_s += start.elapsed_time(end) / 1e3
            time.sleep(2.0)
        return busy_s / (time.perf_counter() - begin)

    return run


def repeat(make: Callable[[Any], Callable[[], object]], *, reads: bool = False) -> Load:
    """A step of kernels without a pause. `reads`: the CPU reads a result after each step, as `loss.item()` does."""

    def run(torch: Any, seconds: float) -> None:
        step = make(torch)
        step()
        begin = say_ready(torch)
        while time.perf_counter() - begin < seconds:
            for _ in range(20):
                step()
                if reads:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()

    return run


def training(torch: Any) -> Callable[[], object]:
    """Large products in bfloat16: what a GPU is bought for."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, a)


def decode(torch: Any) -> Callable[[], object]:
    """A vector through 4 GB of weights, as decoding with one request: bound by the memory."""
    weights = torch.randn(32, 8192, 8192, device="cuda", dtype=torch.float16)
    x = torch.randn(8192, 1, device="cuda", dtype=torch.float16)
    return lambda: [layer @ x for layer in weights]


def small(torch: Any) -> Callable[[], object]:
    """Sums of few numbers: every kernel is over before the next is launched."""
    a = torch.ones(1024, device="cuda")
    return lambda: [a.add_(1.0) for _ in range(50)]


def fp64(torch: Any) -> Callable[[], object]:
    """Small products in 64 bits: few SMs, no tensor core."""
    a = torch.randn(128, 128, device="cuda", dtype=torch.float64)
    return lambda: [torch.mm(a, a) for _ in range(50)]


def integers(torch: Any) -> Callable[[], object]:
    """Sums of integers that stay in the cache, on some of the SMs."""
    a = torch.ones(16 * 1024, dtype=torch.int32, device="cuda")
    return lambda: [a.add_(1).bitwise_xor_(3) for _ in range(50)]


def block(torch: Any) -> Callable[[], object]:
    """One block that counts cycles, on one of the SMs."""
    return lambda: torch.cuda._sleep(20_000_000)


def jpegs(torch: Any) -> Callable[[], object]:
    """Photographs decoded by nvJPEG, which uses the JPEG engines of A100 and H100. Needs torchvision."""
    from torchvision.io import decode_jpeg, encode_jpeg

    files = [encode_jpeg(torch.randint(0, 255, (3, 1080, 1920), dtype=torch.uint8))] * 16
    return lambda: decode_jpeg(files, device="cuda")


def video(torch: Any, seconds: float) -> None:
    """Films decoded by the video engine, without a kernel. Needs PyNvVideoCodec, and OpenCV, which makes the film."""
    import cv2
    import PyNvVideoCodec

    with tempfile.TemporaryDirectory() as folder:
        film = str(Path(folder) / "film.mkv")
        writer = cv2.VideoWriter(film, cv2.VideoWriter_fourcc(*"mpg2"), 25, (1920, 1080))
        picture = torch.randint(0, 255, (90, 160, 3), dtype=torch.uint8).numpy()
        for _ in range(600):  # a decoder takes a third of a second to start, so the film has to last
            writer.write(cv2.resize(picture, (1920, 1080)))
        writer.release()
        begin = None
        while begin is None or time.perf_counter() - begin < seconds:
            demuxer = PyNvVideoCodec.CreateDemuxer(filename=film)
            decoder = PyNvVideoCodec.CreateDecoder(
                gpuid=0, codec=demuxer.GetNvCodecId(), cudacontext=0, cudastream=0, usedevicememory=True
            )
            frames = sum(len(decoder.Decode(packet)) for packet in demuxer)
            if not frames:
                raise RuntimeError("the video engine decoded no frame")
            if begin is None:
                print("ready", flush=True)
                begin = time.perf_counter()


def graphics(torch: Any, seconds: float) -> None:
    """Draws through EGL, without CUDA. Needs moderngl, and the libraries of libglvnd."""
    import moderngl

    context = moderngl.create_standalone_context(backend="egl")
    if "NVIDIA" not in context.info["GL_VENDOR"]:
        raise RuntimeError(f"EGL draws with {context.info['GL_VENDOR']}, not with the GPU")
    program = context.program(
        vertex_shader="#version 330\nin vec2 at; void main() { gl_Position = vec4(at, 0.0, 1.0); }",
        fragment_shader="""#version 330
            out vec4 colour;
            void main() {
                float x = gl_FragCoord.x;
                for (int i = 0; i < 200; i++) x = sin(x) + gl_FragCoord.y;
                colour = vec4(x);
            }""",
    )
    corners = context.buffer(array.array("f", (-1, -1, 1, -1, -1, 1, 1, 1)).tobytes())
    square = context.vertex_array(program, [(corners, "2f", "at")])
    context.simple_framebuffer((2048, 2048)).use()
    print("ready", flush=True)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        square.render(moderngl.TRIANGLE_STRIP)
        context.finish()


def monitors(torch: Any, seconds: float) -> float:
    """Three other programs that read the GPU every second, and no work."""
    command = ["nvidia-smi", "dmon", "-s", "pucvmet", "-d", "1"]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(3)]
    try:
        print("ready", flush=True)
        time.sleep(seconds)
        if any(monitor.poll() is not None for monitor in running):
            raise RuntimeError("nvidia-smi dmon ended too early")
    finally:
        for monitor in running:
            monitor.kill()
    return 0.0


def mps(torch: Any, seconds: float) -> None:
    """Half of each period under NVIDIA's MPS, whose server works for its clients. The server ends after this process."""
    folder = tempfile.mkdtemp()
    os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    end = "while kill -0 $0 2>/dev/null; do sleep 1; done; echo quit -t 1 | nvidia-cuda-mps-control; rm -r $1"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", end, str(os.getpid()), folder], start_new_session=True, stdout=quiet, stderr=quiet)
    # The same process once more, because it has opened the driver without MPS.
    command = [sys.executable, "-m", "tests.workloads.gpu_loads", "kernels 50%", f"{seconds:g}"]
    os.execv(command[0], command)


def late_rank(channels: str) -> Load:
    """A real collective whose second rank never comes: NCCL's kernel spins. `channels`: of NCCL, "" for its own choice.

    Both ranks use one GPU, which NCCL allows to ranks of different hosts only, so each names a host of its own.
    """

    def run(torch: Any, seconds: float) -> None:
        if channels:
            os.environ.update(NCCL_MIN_NCHANNELS=channels, NCCL_MAX_NCHANNELS=channels)
        place = str(Path(tempfile.mkdtemp()) / "meet")  # not a port, which another program might take meanwhile
        command = [sys.executable, "-m", "tests.workloads.gpu_loads", "_rank", place]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other:
            try:
                x = _join(torch, 0, place)
                say_ready(torch)
                torch.distributed.all_reduce(x)  # returns at once: the kernel waits on the GPU
                time.sleep(seconds)
            finally:
                other.kill()
                shutil.rmtree(Path(place).parent)
        print("null", flush=True)
        os._exit(0)  # an exit in order would wait for the other rank

    return run


def _join(torch: Any, rank: int, place: str) -> Any:
    """The first collective, in which both ranks take part."""
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)
    patience = datetime.timedelta(seconds=300)  # for the other rank, and for a collective: longer than any load
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{place}", rank=rank, world_size=2, timeout=patience
    )
    x = torch.ones(2**24, device="cuda")
    torch.distributed.all_reduce(x)
    torch.cuda.synchronize()
    return x


LOADS: dict[str, Load] = {
    **{f"kernels {share:.0%}": kernels(share) for share in SHARES},
    "copies": copies,
    "context": context,
    "rare": rare(1),
    "rare, longer": rare(40),
    "training": repeat(training),
    "late rank": late_rank(""),
    "late rank, 16 channels": late_rank("16"),
    "decode": repeat(decode),
    "small": repeat(small),
    "small and read": repeat(small, reads=True),
    "fp64": repeat(fp64),
    "integers": repeat(integers),
    "block": repeat(block),
    "jpegs": repeat(jpegs),
    "video": video,
    "graphics": graphics,
    "monitors": monitors,
    "mps": mps,
}
STALLS = ("late rank", "late rank, 16 channels", "graphics", "integers")  # or what may be taken for one
LENGTHS = dict.fromkeys(STALLS, 3)  # times as long as the others: a stall has to last


def main(kind: str, rest: str) -> int:
    try:
        import torch
    except ImportError:
        print("torch is not installed", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    if kind == "_rank":
        _join(torch, 1, rest)
        time.sleep(3600.0)
    print(json.dumps(LOADS[kind](torch, float(rest))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
