"""Six slow loops of real torch whose owner does what the hook advises, twice: `python -m tests.bench.advice --repeats 3`.

Needs torch. Prints for each loop the settings that were advised, how near they come to the best of a sweep, and the
predicted gain beside the real one. Other programs on these CPUs change the result: run it alone.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from gpu_exporter_torch import observe
from gpu_exporter_torch.summary import advise

BATCH, STEPS, WORK_S = 8, 120, 0.004
WORKERS, EVERY = (0, 1, 2, 4, 8, 16, 32), (1, 2, 5, 10, 20, 50, 100)
NEAR, WITHIN = 1.3, 0.2
FILES, FILE_BYTES = 256, 8192


class Samples(Dataset[Any]):  # type: ignore[misc]
    """So many samples that all runs have as many steps."""

    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> Any:
        self.make(index)
        return torch.full((8,), float(index)), torch.zeros(1)


BLOCK = zlib.compress(os.urandom(50_000) * 16)
TEXT = os.urandom(40_000)
pools: dict[int, ThreadPoolExecutor] = {}


def wait_for_disk(_: int) -> None:
    time.sleep(0.004)


def decode(_: int) -> None:
    for _ in range(4):
        zlib.decompress(BLOCK)


def read_small_file(index: int, folder: Path) -> None:
    time.sleep(0.002)  # of a network file system, to open it
    torch.frombuffer(bytearray((folder / str(index % FILES)).read_bytes()), dtype=torch.uint8).float().mean()


def tokenize(_: int) -> None:
    """In threads outside of the interpreter's lock, as the fast tokenizers do, in each process that loads."""
    pool = pools.setdefault(os.getpid(), ThreadPoolExecutor(4))
    list(pool.map(zlib.compress, [TEXT[at::4] for at in range(4)]))


def train(
    samples: Samples, workers: int, phase: str = "", act: Callable[[Any], None] | None = None, every: int = 1
) -> Any:
    """The report of a loop that works 4 ms for each batch. `act`: what it does every so many steps, in a phase."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(samples, batch_size=BATCH, num_workers=workers)
    with observe(loader, optimizer=optimizer, model=model, phases=True, summary=False) as observed:
        for step, (inputs, targets) in enumerate(observed):
            loss = ((model(inputs) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            time.sleep(WORK_S)
            if act is not None and step % every == 0:
                with observed.phase(phase):
                    act(model)
            optimizer.step()
        return observed.report()


def each_s(report: Any) -> float:
    return float(report["step_seconds"]) / int(report["measured_steps"])


class Loop(NamedTuple):
    """`run` with a value of the setting; `settings`: the sweep, the first one is the beginning."""

    name: str
    settings: Sequence[int]
    run: Callable[[int], Any]


def loops(folder: Path) -> Iterator[Loop]:
    for number in range(FILES):
        (folder / str(number)).write_bytes(os.urandom(FILE_BYTES))

    def save(model: Any) -> None:
        with (folder / "checkpoint").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": torch.zeros(2_000_000)}, file)
            os.fsync(file.fileno())

    def log(model: Any) -> None:
        with (folder / "log").open("a") as file:
            for parameter in [*model.parameters()] * 10:
                print(torch.histc(parameter.detach(), 512).tolist(), file=file)
            file.flush()
            os.fsync(file.fileno())

    light = Samples(len_of)
    yield Loop("loader waits for a disk", WORKERS, lambda value: train(Samples(wait_for_disk), value))
    yield Loop("loader decodes on a CPU", WORKERS, lambda value: train(Samples(decode), value))
    yield Loop(
        "small files, 2 ms each", WORKERS, lambda value: train(Samples(lambda at: read_small_file(at, folder)), value)
    )
    yield Loop("tokenizer with threads", WORKERS, lambda value: train(Samples(tokenize), value))
    yield Loop("logging each step", EVERY, lambda value: train(light, 0, "logging", log, value))
    yield Loop("checkpoint each step", EVERY, lambda value: train(light, 0, "checkpoint", save, value))


def len_of(_: int) -> None:
    """A sample in memory."""


def follow(report: Any, value: int) -> tuple[int, float | None]:
    """The setting that the summary advises, and the gain that it predicts; the same and None without an advice."""
    text = "; ".join(advise(report))
    gain = re.search(r"about ([\d.]+) times as fast", text)
    if found := re.search(r"num_workers \d+ -> (\d+)", text):
        return int(found[1]), float(gain[1]) if gain else None
    if found := re.search(r"(\d+) times less often", text):
        return value * int(found[1]), float(gain[1]) if gain else None
    return value, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--loop", default="", help="only loops with this in their name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    near, predicted, good = [], 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        for loop in loops(Path(temporary)):
            if given.loop not in loop.name:
                continue
            sweep = {value: each_s(loop.run(value)) for value in loop.settings}
            best = min(sweep.values())
            for _ in range(given.repeats):
                value, report = loop.settings[0], loop.run(loop.settings[0])
                steps = [(value, each_s(report))]
                gains = []
                for _ in range(2):
                    after, gain = follow(report, value)
                    if after == value:
                        break
                    before_s, value, report = each_s(report), after, loop.run(after)
                    steps.append((value, each_s(report)))
                    if gain is not None:
                        gains.append((gain, before_s / each_s(report)))
                predicted += len(gains)
                good += sum(abs(said / real - 1.0) <= WITHIN for said, real in gains)
                near.append(steps[-1][1] / best)
                way = " -> ".join(f"{value}: {1e3 * seconds:.1f} ms" for value, seconds in steps)
                told = ", ".join(f"{said:.1f} was {real:.1f}" for said, real in gains)
                print(f"{loop.name:26} {way}; best {1e3 * best:.1f} ms, {near[-1]:.2f}; predicted {told}", flush=True)
    print(f"within {NEAR} of the best: {sum(each <= NEAR for each in near)} of {len(near)}")
    print(f"predicted gain within {WITHIN:.0%}: {good} of {predicted}")
    return 0 if all(each <= NEAR for each in near) and good >= 0.8 * predicted else 1


if __name__ == "__main__":
    raise SystemExit(main())
