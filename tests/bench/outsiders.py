"""Random lives of holders that wait for an outsider, hang, restart, work at low power or only seem to work.

python -m tests.bench.outsiders [seed] [lives]

Nothing here knows the rule that judges. Where a value comes from is said beside it: a publication, a recording, or
"assumption". Lengths, shares of SMs and pipes, hosts and CPUs are assumptions unless a comment says otherwise.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from gpu_exporter.agent.devices.levels import LEVELS, Level
from tests.testbed.lives import HANGS, WAITS, WORKS, Life, Phase
from tests.testbed.spins import BLIND, Host

Range = tuple[float, float]
Make = Callable[[random.Random, str], Life]
HOUR, LONGEST_S = 3600.0, 60 * 3600.0
SMS = {"H100": 132, "A100": 108}  # data sheets
POLL = 6.06e7  # bytes per second and channel: 120 MB/s by 2 channels, 970 MB/s by 16, recorded on an H200
NOISE: Range = (3.8e-6, 6e-6)  # what GPM shows of a pipe that does nothing: 3.8e-6 to 4.7e-6, recorded on an H200
WATTS: Mapping[str, Mapping[str, Range]] = {
    "context": {"H100": (92, 137), "A100": (70, 81)},  # 109 to 137 W, nccl#1550, gpu-burn#114; A100: public reports
    "spin": {"H100": (0, 25), "A100": (0, 12)},  # above it: 15 to 23 W, nccl#1550, 1 W on an H200; A100: assumption
    "train": {"H100": (300, 690), "A100": (180, 390)},  # 500 to 690 W, NeMo Speech#9291; the rest: assumption
    "decode": {"H100": (135, 253), "A100": (85, 200)},  # 159 to 253 W, InferenceX#828; A100 100 W, Acme (NSDI'24)
    "offload": {"H100": (110, 260), "A100": (70, 140)},  # A100 79 W, LlamaFactory#3520; the rest: assumption
    "evaluate": {"H100": (170, 420), "A100": (100, 240)},  # assumption
    "large messages": {"H100": (180, 350), "A100": (110, 200)},  # assumption
    "tiny messages": {"H100": (105, 185), "A100": (74, 120)},  # assumption, as is the next
    "packets": {"H100": (105, 150), "A100": (72, 95)},
}
# Assumptions all. The ranges of: utilization, wobble_w, sm, tensor, fp64, dram, pcie, nvlink.
LOOKS: Mapping[str, tuple[Range, ...]] = {
    "train": ((0.97, 1), (6, 45), (0.4, 0.95), (0.05, 0.5), (0.01, 0.1), (0.1, 0.6), (1e6, 3e9), (1e9, 2e11)),
    "decode": ((0.95, 1), (0.8, 15), (0.1, 0.65), (1e-3, 0.03), (1e-3, 0.02), (0.02, 0.55), (1e4, 1e8), (1, 1e7)),
    "offload": ((0.97, 1), (1, 9), (0.04, 0.5), (1e-3, 0.1), (1e-3, 0.01), (5e-3, 0.1), (1e8, 3e10), (1e6, 1e9)),
    "evaluate": ((0.95, 1), (2, 25), (0.2, 0.7), (0.05, 0.2), (0.01, 0.1), (0.1, 0.3), (1e5, 1e8), (1, 1e9)),
    "large messages": ((0.98, 1), (0.5, 8), (0.06, 0.25), NOISE, (1e-4, 0.01), (0.02, 0.4), (1e6, 5e10), (1e10, 6e11)),
    "tiny messages": ((0.98, 1), (0.3, 5), (8e-3, 0.2), NOISE, NOISE, (1e-5, 0.01), (1e5, 1e9), (1e5, 1e9)),
    "packets": ((0.99, 1), (0.3, 6), (7e-3, 0.25), NOISE, NOISE, (1e-5, 0.02), (1e5, 9e9), (1, 1e6)),
}


def between(draw: random.Random, low: float, high: float) -> float:
    """Even in the logarithm where the range is wide."""
    wide = low > 0 and high > 4 * low
    return math.exp(draw.uniform(math.log(low), math.log(high))) if wide else draw.uniform(low, high)


class Waits(NamedTuple):
    """How a job waits again and again. `wait`, `work`: ranges of seconds. `shapes`: how the waits follow each other.
    `late`: whose GPUs rest ("here": rank 0, "some": several, "moves": another in each round; no GPU here rests if the rank
    is "away" on another node, or "all" spin over NVLink). `cpus`: CPUs that its loaders use meanwhile. `helper`: the late
    rank works on its GPU, in small. `sleeps`: memory is given back for the wait. `stairs`: ranks begin to wait, or
    arrive, one by one. `before`: it waits before it ever works. `again`: how likely a wait ends in a new start.
    """

    wait: Range
    work: Range = (60, 3600)
    rounds: tuple[int, int] = (3, 60)
    shapes: str = "same loose tail grow fall two last"
    late: str = "here here here away all moves some"
    cpus: Range | None = None
    helper: bool = False
    sleeps: bool = False
    stairs: bool = False
    before: bool = False
    again: float = 0.0
    works: str = "train"


def draw_waits(draw: random.Random, waits: Waits) -> list[float]:
    """The lengths of all waits, 30 s to 10 h."""
    rounds, base = round(between(draw, *waits.rounds)), between(draw, *waits.wait)
    shape, every, factor = draw.choice(waits.shapes.split()), draw.randint(3, 12), draw.uniform(3, 20)
    growth = draw.uniform(1.02, 1.8) if shape == "grow" else draw.uniform(0.6, 0.98)
    lengths = []
    for number in range(rounds):
        seconds = base * draw.uniform(0.85, 1.15)
        if shape == "loose":
            seconds = between(draw, *waits.wait)
        elif shape == "tail":
            seconds = base * math.exp(draw.gauss(0, 0.9))
        elif shape in ("grow", "fall"):
            seconds *= min(growth**number, 1e4)
        elif number % every == every - 1 if shape == "two" else shape == "last" and number == rounds - 1:
            seconds *= factor
        lengths.append(min(max(seconds, 30.0), 36_000.0))
    return lengths


class Story:
    """Writes a life. Each life has its own boards, spin, host and habits; each phase differs a little from the last."""

    def __init__(self, draw: random.Random, kind: str, hours: Range = (1, 60), least: int = 1):
        self.draw, self.kind, self.between = draw, kind, partial(between, draw)
        self.model = "A100" if draw.random() < 1 / 3 else "H100"
        self.gpus = draw.choice([n for n in (1, 1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 8, 8) if n >= least])
        self.visible = draw.random() < 0.75
        self.own_network = draw.random() < 0.7  # else a host network, whose traffic is not the holder's
        self.chatter = draw.choice((0.0, 0.0, 2e3, 2e4, 6e4))  # keepalives, loggers, wandb
        self.full, self.memory, self.asleep = self.between(12, 76), 0.5, draw.uniform(0.05, 0.8)
        self.board_w = [draw.uniform(-4, 4) for _ in range(self.gpus)]
        self.context_w = draw.uniform(*WATTS["context"][self.model])
        self.spin_w, self.wobble_w = self.context_w + draw.uniform(*WATTS["spin"][self.model]), draw.uniform(0.2, 1.5)
        self.channels = draw.choice((2, 2, 4, 8, 8, 12, 16, 16, 24, 32))
        self.polls = draw.random() < 0.25  # the ring leaves the node, so that even ranks inside poll for the network
        self.spin_cores, self.loaders = draw.uniform(1.0, 2.5), self.between(0.05, 24)
        self.interrupts = draw.random() < 0.2  # in a wait the host does something now and then
        self.steps = draw.random() < 0.15  # in a wait the spin changes its power: other collectives, other clocks
        self.trains = self.look("train", 0)
        self.phases: list[Phase] = []
        self.seconds, self.limit = 0.0, self.between(*hours) * HOUR
        self.add(draw.uniform(60, 600), [self.rest(gpu) for gpu in range(self.gpus)], WORKS, self.quiet())
        self.load()

    def look(self, name: str, gpu: int) -> Level:
        utilization, *others = (self.between(*span) for span in LOOKS[name])
        watts = self.draw.uniform(*WATTS[name][self.model]) + self.board_w[gpu]
        return Level._make((utilization, watts, *others, name))

    def rest(self, gpu: int) -> Level:
        return Level(0.0, LEVELS[self.model, "rest"].watts * 1.02 + self.board_w[gpu] / 4)

    def context(self, gpu: int) -> Level:
        return Level(0.0, self.context_w + self.board_w[gpu])

    def train(self, gpu: int) -> Level:
        return self.trains._replace(watts=self.trains.watts * self.draw.uniform(0.95, 1.05) + self.board_w[gpu])

    def spin(self, gpu: int, polls: bool, extra_w: float = 0.0) -> Level:
        sm = self.channels / SMS[self.model] * self.draw.uniform(0.97, 1.0)
        noise, dram, watts = self.draw.uniform(*NOISE), self.draw.uniform(0, 1e-4), self.spin_w + self.board_w[gpu]
        pcie = POLL * self.channels * self.draw.uniform(0.95, 1.05) if polls else self.between(1, 1e6)
        return Level(1.0, watts + extra_w, self.wobble_w, sm, noise, noise, dram, pcie)

    def small(self, gpu: int, sort: str, sms: int) -> Level:
        """A kernel that runs without end on a few SMs. One draws 4 W at most: 600 W above rest by 132 of them."""
        share = sms / SMS[self.model]
        own = self.between(0.001, 0.3)  # of the peak of a pipe of these SMs
        dram = share * self.between(1e-3, 0.3)
        if sort == "memory":  # an SM alone can ask for somewhat more than its share of the bandwidth
            dram, own = min(share * self.between(0.02, 1.3), 0.5), 0.0
        tensor, fp64 = (share * own if sort == pipe else self.draw.uniform(*NOISE) for pipe in ("tensor", "fp64"))
        watts = self.context_w + self.board_w[gpu] + sms * self.draw.uniform(0.1, 1.0) * (0.4 + own) + 150 * dram
        sm, pcie = share * self.draw.uniform(0.7, 1.0), self.draw.choice((0.0, self.between(1e3, 3e7)))
        return Level(self.draw.uniform(0.99, 1.0), watts, self.between(0.2, 3), sm, tensor, fp64, dram, pcie)

    def quiet(self, loaders: float | None = None, disk: float | None = None) -> Host:
        network = self.between(300, 2e4) + self.chatter * self.draw.uniform(0.5, 1.5) if self.own_network else None
        used = self.draw.uniform(0.005, 0.04) if loaders is None else loaders
        written = self.draw.choice((0.0, 0.0, self.between(100, 2e4))) if disk is None else disk
        return Host(used, False, written, network) if self.visible else BLIND

    def busy(self, new: bool = False) -> Host:
        used, network = self.loaders * self.draw.uniform(0.7, 1.3), self.between(1e4, 3e8) if self.own_network else None
        return Host(used, new, self.between(1e3, 3e8), network) if self.visible else BLIND

    def add(self, s: float, levels: list[Level], truth: str, host: Host, cores: float = 0.1, event: str = "") -> None:
        s = s if event else min(s, self.limit - self.seconds)
        if s >= 5:
            self.phases.append(Phase(s, tuple(levels), truth, host, cores, self.memory, event))
            self.seconds += s

    def left(self) -> bool:
        return self.limit - self.seconds > 60

    def load(self, event: str = "") -> None:
        """The start of its processes: a host that reads, and memory that grows from 2 GiB."""
        steps = self.draw.randint(2, 6)
        for number in range(steps):
            self.memory = 2 + (self.full - 2) * number / steps
            levels = [self.rest(gpu) if event else self.context(gpu) for gpu in range(self.gpus)]
            self.add(self.between(10, 90), levels, WORKS, self.busy(not number), self.gpus + self.loaders, event)
            event = ""
        self.memory = self.full

    def work(self, seconds: float, name: str = "train") -> None:
        levels = [self.train(gpu) if name == "train" else self.look(name, gpu) for gpu in range(self.gpus)]
        self.add(seconds, levels, WORKS, self.busy(), self.gpus * self.draw.uniform(1.0, 1.6) + self.loaders)

    def pick_late(self, late: str) -> set[int]:
        if self.gpus == 1 or late in ("away", "all"):
            return set()
        some = self.draw.randint(1, self.gpus - 1) if late == "some" else 1
        return set(self.draw.sample(range(self.gpus), some) if late == "moves" else range(some))

    def blocked(self, s: float, late: set[int], polls: bool, waits: Waits | None = None, event: str = "") -> None:
        """Some ranks spin, the late ones rest or work in small, until that is over. Without `waits`: it hangs."""
        draw, until, at, truth = self.draw, self.seconds + s, self.context, WAITS if waits else HANGS
        if event[:4] in ("gone", "kill") or (event[:3] == "xid" and draw.random() < 0.5):
            at = self.rest
        if waits and waits.helper:
            small = partial(self.small, sort=draw.choice(("fp64", "tensor")), sms=draw.randint(1, 40))
            at = draw.choice((small, small, partial(self.look, "decode")))
        cpus = self.between(*waits.cpus) if waits and waits.cpus else draw.uniform(0.005, 0.04)
        host, idle_cores, extra_w = self.quiet(cpus), draw.choice((0.01, 0.05, 1.0)), 0.0
        while (rest := min(until, self.limit) - self.seconds) >= 5:
            levels = [at(gpu) if gpu in late else self.spin(gpu, polls, extra_w) for gpu in range(self.gpus)]
            piece = min(rest, self.between(120, 5400)) if self.interrupts or self.steps else rest
            cores = (self.gpus - len(late)) * self.spin_cores * draw.uniform(0.97, 1.03) + len(late) * idle_cores + cpus
            self.add(piece, levels, truth, host, cores, event)
            event = ""
            if self.interrupts and until - self.seconds > 60:  # a log is rotated, a probe runs, somebody looks
                blip = self.quiet(draw.uniform(0.03, 0.6), self.between(1e3, 1e7))
                self.add(draw.uniform(10, 40), levels, truth, blip, cores + 0.3)
            extra_w = draw.uniform(-3, 12) if self.steps and draw.random() < 0.4 else extra_w

    def climb(self, late: set[int], polls: bool) -> None:
        """Ranks finish one after another: those that have finished spin (the late ones rest), the others train."""
        done: set[int] = set()
        for gpu in self.draw.sample(range(self.gpus), self.gpus - 1):
            done.add(gpu)
            ends = [self.context(one) if one in late else self.spin(one, polls) for one in range(self.gpus)]
            levels = [end if one in done else self.train(one) for one, end in enumerate(ends)]
            self.add(self.between(10, 900), levels, WAITS, self.quiet(), self.gpus * self.spin_cores)

    def rounds(self, waits: Waits) -> str:
        """Waits and works in turn. Returns whose ranks were late."""
        draw, late = self.draw, self.draw.choice(waits.late.split())
        low, high = sorted(self.between(*waits.work) for _ in range(2))
        self.work(0 if waits.before else self.between(max(low, 30), max(4 * high, 2 * HOUR)), waits.works)
        for seconds in draw_waits(draw, waits):
            if not self.left():
                break
            members, polls = self.pick_late(late), late == "away" or (late != "all" and self.polls)
            if waits.stairs:
                self.climb(members, polls)
            self.memory = self.full * (self.asleep if waits.sleeps else 1)
            self.blocked(seconds, members, polls, waits)
            while waits.stairs and len(members) > 1:  # the late ones arrive one after another
                members.pop()
                self.blocked(self.between(10, 900), members, polls, waits)
            self.memory = self.full * (draw.choice((1.0, 1.0, 0.97)) if waits.sleeps else 1)
            if draw.random() < waits.again:
                self.load("restart")
            self.work(self.between(low, high), waits.works)
        return late

    def hang(self, hours: Range = (1, 6), late: str = "", event: str = "", polls: bool | None = None) -> None:
        late = late or self.draw.choice(("here", "here", "some", "away", "all"))
        over = polls if polls is not None else late == "away" or (late != "all" and self.polls)
        seconds = self.between(*hours) * HOUR
        if self.phases[-1].truth == WAITS:  # else this wait would itself be the begin of the hang
            self.limit += HOUR / 3
            self.work(self.between(20, HOUR / 3))
        self.limit = min(max(self.limit, self.seconds + seconds), LONGEST_S)
        self.blocked(seconds, self.pick_late(late), over, event=event)

    def end(self) -> Life:
        self.limit = max(self.limit, HOUR)  # the shortest life; it ends with plain work
        self.work(HOUR - self.seconds)
        return Life(self.kind, self.model, tuple(self.phases), self.visible)


# Group 1: it waits for somebody outside, and goes on by itself. G01 and G02 are cases of users, G11 is vLLM#12663.
WAITERS: Mapping[str, Waits] = {
    "rollouts": Waits((300, 3600), (30, 900), (5, 60)),
    "rollouts that grow": Waits((60, 1200), (60, 600), (8, 60), "grow"),
    "rollouts, memory sleeps": Waits((120, 3600), (30, 900), (4, 60), sleeps=True),
    "judge": Waits((60, 1800), (60, 1200)),
    "simulator": Waits((600, 18_000), (300, 3600), (3, 20)),
    "tools": Waits((30, 5400), (20, 600), (5, 60), "tail two loose"),
    "slow store": Waits((600, 9000), (1800, 14_400), (3, 20), "same tail grow last", "here here away"),
    "licence": Waits((900, 36_000), (600, 10_800), (3, 8), "loose tail last"),
    "tokenizes": Waits((900, 18_000), (1800, 10_800), (1, 4), late="here", cpus=(3, 120), before=True),
    "evaluation by a service": Waits((600, 7200), (1800, 10_800), (3, 25), "same grow tail"),
    "human": Waits((120, 9000), (30, 3600), (3, 40), "two loose last"),
    "bursts": Waits((120, 5400), (5, 55), (5, 60)),
    "short waits": Waits((30, 240), (30, 600), (30, 60)),
    "few long waits": Waits((7200, 36_000), (120, 7200), (3, 5), "same loose"),
    "waits before work": Waits((300, 18_000), (60, 3600), (3, 30), before=True),
    "late on another node": Waits((120, 7200), (30, 3600), late="away"),
    "all spin over NVLink": Waits((120, 7200), (30, 3600), late="all"),
    "stairs": Waits((60, 5400), (60, 3600), (3, 25), late="some here away", stairs=True),
    "late ranks move": Waits((120, 5400), (30, 1800), late="moves some"),
    "preempted": Waits((300, 5400), (60, 1800), (4, 40), again=0.25),
    "rank 0 evaluates": Waits((300, 10_800), (600, 7200), (3, 20), late="here", helper=True),
    "server between requests": Waits((30, 36_000), (5, 1800), (3, 60), "loose tail two", "all away", works="decode"),
    "anything": Waits((30, 36_000), (5, 7200), (1, 60), sleeps=True, stairs=True, again=0.05),
}


def waiting(draw: random.Random, kind: str) -> Life:
    story = Story(draw, kind)
    story.rounds(WAITERS[kind])
    story.work(story.between(60, 4 * HOUR) * draw.choice((0, 1, 1)))
    return story.end()


# Group 2: it hangs, and nothing ends that.
def hanging(draw: random.Random, kind: str, late: str = "", polls: bool | None = None, events: str = "") -> Life:
    story = Story(draw, kind, (0.1, 50), 2 if late == "here" else 1)
    story.work(story.between(120, 40 * HOUR) if kind != "hang from the start" else 0)
    if events and draw.random() < 0.3:  # the rank is late before it ends
        story.hang((0.02, 1), late, polls=polls)
    story.hang((1, 6), late, f"{draw.choice(events.split())} 0" if events else "", polls)
    return story.end()


def hangs_after_waits(draw: random.Random, kind: str, rounds: tuple[int, int], same: bool = False) -> Life:
    waits = draw.choice(list(WAITERS.values()))._replace(rounds=rounds)
    story = Story(draw, kind, (1, 54))
    late = story.rounds(waits)
    story.memory *= story.asleep if waits.sleeps and draw.random() < 0.7 else 1
    story.hang(late=late if same or draw.random() < 0.5 else "")
    return story.end()


# Group 3: a timeout of the framework ends the hang, and the job starts again in its place.
def restarting(draw: random.Random, kind: str, work: Range, waits: bool = False, hangs: float = 0.5) -> Life:
    story, timeout = Story(draw, kind, (2, 50)), draw.choice((300, 600, 600, 1800, 1800, 3600, 7200, 10_800)) / HOUR
    late = draw.choice(("here", "away", "all", "some"))
    for _ in range(draw.randint(2, 9)):
        if waits:
            story.rounds(draw.choice(list(WAITERS.values()))._replace(rounds=(1, 6)))
        elif work[1]:
            story.work(story.between(*work))
        if not story.left():
            break
        story.hang((timeout, timeout * 1.05), late if draw.random() < 0.8 else "")
        story.limit = min(max(story.limit, story.seconds + 1200), 54 * HOUR)
        story.load("restart")
    story.hang() if draw.random() < hangs else story.work(story.between(600, 10 * HOUR))
    return story.end()


# Group 4: it works, and looks as if it hung. Small kernels: assumptions, but for what WATTS says of the others.
def small_work(draw: random.Random, kind: str, sort: str, sms: Range, after: bool = False, one: bool = False) -> Life:
    """`after`: it trained before. `one`: only its first GPU works. Some change their size now and then, or pause."""
    story = Story(draw, kind)
    story.work(story.between(600, 0.5 * story.limit) if after else 0)
    count, blocking = max(1, round(story.between(*sms))), draw.random() < 0.3
    changes, pauses, users = draw.random() < 0.3, draw.random() < 0.4, 1 if one else story.gpus
    while story.left():
        levels = [story.small(gpu, sort, count) if gpu < users else story.context(gpu) for gpu in range(story.gpus)]
        seconds = story.between(600, 20 * HOUR) if changes or pauses else LONGEST_S
        story.add(seconds, levels, WORKS, story.quiet(), users * (0.03 if blocking else 1.01) + 0.05)
        if changes:
            count = min(max(1, round(count * story.between(0.5, 2))), 60)
            story.memory = min(max(story.memory * draw.uniform(0.8, 1.25), 2), 78)
        if pauses:  # results are written
            levels = [story.context(gpu) for gpu in range(story.gpus)]
            story.add(story.between(10, 900), levels, WORKS, story.quiet(0.5, story.between(1e3, 1e8)), 1.0)
        story.work(story.between(30, 2 * HOUR) if after and draw.random() < 0.2 else 0)
    return story.end()


def low_work(draw: random.Random, kind: str, looks: str, cpus: Range = (0.02, 2)) -> Life:
    """Long work at low power, in pieces that differ, between pieces of training or not, with a flat power or not."""
    story, trains, flat = Story(draw, kind), draw.random() < 0.5, draw.random() < 0.4
    while story.left():
        story.work(story.between(60, 4 * HOUR) if trains else 0)
        look = draw.choice(looks.split(", "))
        levels = [story.look(look, gpu) for gpu in range(story.gpus)]
        if flat:
            levels = [level._replace(wobble_w=min(level.wobble_w, 1.0)) for level in levels]
        cores = story.gpus * draw.uniform(1.0, 2.0) + story.between(*cpus)
        story.add(story.between(300, 10 * HOUR), levels, WORKS, story.quiet(), cores)
    return story.end()


# Group 5: a tenant who wants to keep idle GPUs, and spins on purpose. Its last phase is a hang: it never works again.
def hiding(draw: random.Random, kind: str, rounds: tuple[int, int], shapes: str, again: float = 0.0) -> Life:
    story, late = Story(draw, kind, (1, 54)), draw.choice(("all", "all", "here", "away"))
    story.channels, story.polls = draw.randint(1, 40), draw.random() < 0.3
    story.spin_w = story.context_w + story.channels * draw.uniform(0, 0.6)
    story.spin_cores, before = draw.choice((0.05, 1.0, 1.0)), draw.random() < 0.3
    story.rounds(Waits((600, 7200), (20, 1200), rounds, shapes, late, again=again, before=before))
    story.hang((1, 10), late)
    return story.end()


MAKERS: dict[str, tuple[float, Make]] = {
    **dict.fromkeys(WAITERS, (1.5, waiting)),
    "hang, rank 0 rests": (3.0, partial(hanging, late="here", polls=False)),
    "hang, all spin": (2.0, partial(hanging, late="all", polls=False)),
    "hang over a network": (2.0, partial(hanging, late="away", polls=True)),
    "hang, some rest": (1.5, partial(hanging, late="some")),
    "hang, a process ends": (2.0, partial(hanging, late="here", events="gone gone killed")),
    "hang, a process is stopped": (1.0, partial(hanging, late="here", events="stopped")),
    "hang, XID": (1.5, partial(hanging, late="here", events="xid")),
    "hang from the start": (2.5, hanging),
    "hang after one to three waits": (2.0, partial(hangs_after_waits, rounds=(1, 3))),
    "hang after many waits": (3.0, partial(hangs_after_waits, rounds=(5, 60))),
    "hang that begins as the waits did": (2.5, partial(hangs_after_waits, rounds=(4, 60), same=True)),
    "timeout and restart": (3.0, partial(restarting, work=(600, 14_400))),
    "timeout, short work": (1.5, partial(restarting, work=(20, 600))),
    "timeout at the first collective": (1.5, partial(restarting, work=(0, 0), hangs=0.8)),
    "timeout between waits": (1.5, partial(restarting, work=(600, 7200), waits=True)),
    "one block": (1.5, partial(small_work, sort="fp64", sms=(1, 1.4))),
    "ODE or MCMC": (2.0, partial(small_work, sort="fp64", sms=(1, 12))),
    "ODE or MCMC after training": (2.0, partial(small_work, sort="fp64", sms=(1, 40), after=True)),
    "small CFD": (1.5, partial(small_work, sort="fp64", sms=(8, 40))),
    "RNN scan": (1.5, partial(small_work, sort="tensor", sms=(2, 32))),
    "RNN scan after training": (1.5, partial(small_work, sort="tensor", sms=(2, 32), after=True)),
    "few RL environments": (1.5, partial(small_work, sort="fp64", sms=(2, 24), after=True)),
    "hashing": (1.5, partial(small_work, sort="integer", sms=(1, 40))),
    "hashing after training": (1.5, partial(small_work, sort="integer", sms=(1, 40), after=True)),
    "pointer chasing": (1.5, partial(small_work, sort="memory", sms=(1, 40))),
    "pointer chasing after training": (1.0, partial(small_work, sort="memory", sms=(1, 40), after=True)),
    "one of its GPUs in small": (1.5, partial(small_work, sort="fp64", sms=(1, 40), one=True)),
    "decode at low load": (2.0, partial(low_work, looks="decode")),
    "ZeRO-3 offload": (2.0, partial(low_work, looks="offload", cpus=(4, 60))),
    "evaluation": (1.5, partial(low_work, looks="evaluate")),
    "NCCL tests": (1.5, partial(low_work, looks="large messages, tiny messages")),
    "packets": (1.0, partial(low_work, looks="packets")),
    "hides once": (1.5, partial(hiding, rounds=(1, 1), shapes="same")),
    "hides three times": (1.5, partial(hiding, rounds=(3, 3), shapes="same loose")),
    "hides, growing": (1.5, partial(hiding, rounds=(3, 12), shapes="grow")),
    "hides by restart": (1.5, partial(hiding, rounds=(1, 8), shapes="same grow", again=1.0)),
}

KINDS: dict[str, Callable[[random.Random], Life]] = {
    name: partial(lambda name, draw: MAKERS[name][1](draw, name), name) for name in MAKERS
}
WEIGHTS: dict[str, float] = {name: weight for name, (weight, _) in MAKERS.items()}


def draw_life(draw: random.Random) -> Life:
    return KINDS[draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]](draw)


def main() -> None:
    seed, lives = (int(word) for word in (*sys.argv[1:3], *("1", "500")[len(sys.argv) - 1 :]))
    draw, number, truths = random.Random(seed), Counter[str](), (WORKS, WAITS, HANGS)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    for life in (draw_life(draw) for _ in range(lives)):
        for kind in (life.kind, "sum"):
            number[kind] += 1
            for phase in life.phases:
                hours[kind, phase.truth] += phase.seconds / HOUR
    print(f"{'kind':36}{'lives':>9}{'hours':>9}" + "".join(f"{truth:>9}" for truth in truths))
    for kind in (*KINDS, "sum"):
        parts = [hours[kind, truth] for truth in truths]
        print(f"{kind:36}" + "".join(f"{part:9.1f}" for part in (number[kind], sum(parts), *parts)))


if __name__ == "__main__":
    main()
