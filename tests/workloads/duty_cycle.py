"""A ground truth for the busy ratio: kernels for a known share of each period, or copies without any kernel.

python -m tests.workloads.duty_cycle kernels|copies SHARE SECONDS

Prints `ready` when the load begins, and at its end the share that it really reached.

Kernel time is measured on the device, by events around each batch, so that the truth does not rest on sleeping well.
Needs torch and a GPU.
"""

from __future__ import annotations

import sys
import time
from typing import Any

PERIOD_S = 1.0
SIZE = 2048


def run_kernels(torch: Any, share: float, seconds: float) -> float:
    """Matrix products for `share` of each period; the share of time with a kernel, by the device's own clock."""
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
    torch.mm(a, a)
    torch.cuda.synchronize()
    print("ready", flush=True)
    begin, busy_s = time.perf_counter(), 0.0
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


def run_copies(torch: Any, seconds: float) -> float:
    """Copies from pinned memory, no kernel."""
    host = torch.empty(256 * 1024**2, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    print("ready", flush=True)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return 0.0


def main(kind: str, share: float, seconds: float) -> int:
    try:
        import torch
    except ImportError:
        print("torch is not installed", file=sys.stderr)
        return 3
    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 3
    reached = run_kernels(torch, share, seconds) if kind == "kernels" else run_copies(torch, seconds)
    print(reached)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
