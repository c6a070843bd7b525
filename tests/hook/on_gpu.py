"""The hook on a real GPU, for `make gpu-check`: prints one JSON object. Needs torch with CUDA.

Same results with deterministic algorithms; the share of waiting on the GPU's time line for waits that the work hides and
for waits that starve the GPU; the cost of a step of about 10 ms; no event inside of a CUDA graph.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

import torch

from gpu_exporter_torch import observe

PAIRS = 30
STEPS = 60


class Work:
    """Products of matrices on the GPU, of a known length."""

    def __init__(self, seconds: float) -> None:
        self.a = torch.randn(2048, 2048, device="cuda")
        self.repeats = 1
        self.run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.repeats = 50
        self.run()
        torch.cuda.synchronize()
        self.repeats = max(1, round(50 * seconds / (time.perf_counter() - begin)))

    def run(self) -> None:
        for _ in range(self.repeats):
            self.a @ self.a


def load(number: int, seconds: float) -> Iterator[int]:
    for batch in range(number):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        yield batch


def wait_share(wait_s: float, work_s: float, *, sync: bool) -> dict[str, Any]:
    work = Work(work_s)
    with observe(load(200, wait_s), summary=False) as batches:
        for _ in batches:
            work.run()
            if sync:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        batches._gpu.read()
        report = batches.report()
    waited, worked = report["gpu_wait_seconds"], report["gpu_work_seconds"]
    share = None if waited is None else waited / (waited + worked)
    return {
        "share": share,
        "share_by_next": report["wait_seconds"] / report["step_seconds"],
        "gpus": report["gpus"] != [],
    }


def train(observed: bool) -> list[float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(50, 32, 64, generator=torch.Generator().manual_seed(1))
    batches: Any = observe(data, optimizer=optimizer, model=model, phases=True, summary=False) if observed else data
    losses = []
    for batch in batches:
        loss = (model(batch.cuda()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cost() -> dict[str, Any]:
    work = Work(0.010)

    def measure(observed: bool) -> float:
        batches: Any = observe(range(STEPS), summary=False) if observed else range(STEPS)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in batches:
            work.run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / STEPS

    ratios = []
    for number in range(PAIRS):
        order = (True, False) if number % 2 else (False, True)
        found = {observed: measure(observed) for observed in order}
        ratios.append(found[True] / found[False] - 1.0)
    ordered = sorted(ratios)
    return {
        "median": statistics.median(ratios),
        "p10": ordered[PAIRS // 10],
        "p90": ordered[-PAIRS // 10],
        "pairs": PAIRS,
    }


def capture() -> str:
    """A loop whose body is captured once, and then replayed."""
    static = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with observe(range(20), summary=False) as batches:
        for number in batches:
            if number == 10:
                with torch.cuda.graph(graph), batches.phase("forward"):
                    static += 1
            if number > 10:
                graph.replay()
        torch.cuda.synchronize()
    return "as expected" if float(static[0]) == 9.0 else f"wrong: {float(static[0])}"


def main() -> None:
    torch.use_deterministic_algorithms(True)
    plain, again, observed = train(False), train(False), train(True)
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "same_results": plain == observed,
                "same_without_the_hook": plain == again,
                "wait_hidden_by_work": wait_share(0.006, 0.010, sync=False),
                "wait_that_starves": wait_share(0.015, 0.005, sync=True),
                "cost_of_10_ms": cost(),
                "cuda_graph": capture(),
            }
        )
    )


if __name__ == "__main__":
    main()
