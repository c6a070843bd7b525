"""A simulated day of a small cluster: the real ledger counts the time, and promtool evaluates the rules.

Pods and jobs start and end on four nodes, each with its own work pattern. Exporters are restarted, scrapes fail, readings
fail. The truth (the intervals in which a GPU worked) is kept apart from the values that the exporters can see. The
simulator uses no threshold of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId
from tests.rules.world import Node, World

NODES, GPUS = 4, 4
POLL_S = 5
MINUTES = 24 * 60
RULES = LedgerRules(float(POLL_S), 3, 0.1, 0.7, 60.0)

BLIND_S = 120.0  # a restart of at most 50 s, its next scrape, and failed readings that an idle run may bridge
BEFORE_S = 15.0  # time that a restart loses: since the last write of the state file, and the current reading
Interval = tuple[float, float]
Pattern = Callable[[Random, float, float], list[Interval]]


def pieces(
    random: Random, start: float, end: float, length: Callable[[], float], pause: Callable[[], float]
) -> list[Interval]:
    """Alternating work and pauses."""
    work: list[Interval] = []
    now = start + pause() * random.random()
    while now < end:
        until = min(end, now + length())
        work.append((now, until))
        now = until + pause()
    return work


def training(random: Random, start: float, end: float) -> list[Interval]:
    """Hours of work, with evaluation and checkpoints of some minutes on the CPU."""
    draw = random.uniform
    return pieces(random, start, end, lambda: draw(300, 3000), lambda: draw(20, 600))


def notebook(random: Random, start: float, end: float) -> list[Interval]:
    """A person: some minutes of work, some minutes of thought, lunch, and the night."""
    draw = random.uniform
    return pieces(random, start, end, lambda: draw(1, 300), lambda: random.choice((draw(30, 900), draw(3600, 20_000))))


def serving(random: Random, start: float, end: float) -> list[Interval]:
    """Requests of 50 ms at random, rarely at night."""
    rate = random.choice((1 / 5.0, 1 / 300.0, 1 / 1500.0))
    return pieces(random, start, end, lambda: 0.05, lambda: random.expovariate(rate))


def heartbeat(random: Random, start: float, end: float) -> list[Interval]:
    """200 ms every 50 minutes, which no scrape shows."""
    return pieces(random, start, end, lambda: 0.2, lambda: 3000.0)


def bursts(random: Random, start: float, end: float) -> list[Interval]:
    draw = random.uniform
    return pieces(random, start, end, lambda: draw(0.2, 60), lambda: draw(600, 3300))


def forgotten(random: Random, start: float, end: float) -> list[Interval]:
    """Worked once, or never."""
    return [(start + 30, start + random.uniform(31, 2000))] if random.random() < 0.5 else []


def preparing(random: Random, start: float, end: float) -> list[Interval]:
    """Unpacks and sorts on its CPUs for hours, while its GPU waits."""
    return []


def on_cpus(random: Random, start: float, end: float) -> list[Interval]:
    draw = random.uniform
    return pieces(random, start, end, lambda: draw(1800, 9000), lambda: draw(600, 4000))


PATTERNS: tuple[Pattern, ...] = (training, notebook, serving, heartbeat, bursts, forgotten, preparing)
HOST_RATIO = 0.6  # of its CPUs, while a holder works there
HOST_MEAN_S = 600.0
HOST_BLIND_S = 120.0  # after a restart


@dataclass(eq=False)
class Unit:
    """One GPU of a holder. `hidden`: utilization is always 0, and only another witness shows the work."""

    node: int
    gpu: int
    work: list[Interval]
    hidden: bool = False
    done: int = 0

    def seen_work(self, disturbed: list[Interval]) -> list[Interval]:
        """The work without pieces within unknown periods of at most a minute.

        An idle run may bridge this much unknown time (docs/concepts.md). With one seed in some hundred, a piece of 200 ms
        is in such a period.
        """
        short = [(a - BEFORE_S, b + POLL_S) for a, b in disturbed if b - a <= BLIND_S]
        return [(a, b) for a, b in self.work if not any(start <= a and b <= end for start, end in short)]

    def busy_s(self, start: float, end: float) -> float:
        """Seconds of work between two times. Each call must be later than the one before."""
        while self.done < len(self.work) and self.work[self.done][1] <= start:
            self.done += 1
        total = 0.0
        for index in range(self.done, len(self.work)):
            begin, until = self.work[index]
            if begin >= end:
                break
            total += min(until, end) - max(begin, start)
        return total


@dataclass(eq=False)
class TrueHolder:
    """One incarnation of a pod, or a job.

    `group`: the Job that the pod belongs to, "" for none. `host`: when the holder works on its CPUs.
    """

    name: str
    uid: str
    start: float
    end: float
    kind: str
    units: list[Unit] = field(default_factory=list)
    group: str = ""
    host: list[Interval] = field(default_factory=list)

    @property
    def is_job(self) -> bool:
        return self.name.isdigit()

    def holder(self) -> Holder:
        if self.is_job:
            return Holder(HolderKey("slurm", self.uid), job_id=self.name, user="ada", account="phys")
        return Holder(HolderKey("kubernetes", self.uid), "ml", self.name, "main")

    def host_ratio(self, now: float) -> float:
        """Mean share of its CPUs that the holder used in the last ten minutes."""
        busy_s = sum(max(0.0, min(end, now) - max(start, now - HOST_MEAN_S)) for start, end in self.host)
        return HOST_RATIO * busy_s / HOST_MEAN_S

    def idle_stretches(self, disturbed: list[list[Interval]]) -> list[Interval]:
        """Periods in which none of its GPUs showed work; see `seen_work`."""
        now, found = self.start, []
        for begin, end in sorted(piece for unit in self.units for piece in unit.seen_work(disturbed[unit.node])):
            if begin > now:
                found.append((now, begin))
            now = max(now, end)
        return [*found, (now, self.end)] if now < self.end else found


@dataclass
class Day:
    """The truth, and the world that Prometheus sees.

    `disturbed`: unknown periods, by node. `pages`: the metrics page of each successful scrape, by node and minute.
    """

    world: World
    holders: list[TrueHolder]
    disturbed: list[list[Interval]]
    pages: dict[tuple[int, int], str]


def draw_team(random: Random, number: int, places: list[tuple[int, int]], start: float, end: float) -> list[TrueHolder]:
    """The pods of one Job, with one GPU each: all, one or none of them work. In the first Job of a day, one works."""
    workers = 1 if number == 1 else random.choice((0, 1, len(places)))
    team = []
    for index, (node, gpu) in enumerate(places):
        work = training(random, start, end) if index < workers else []
        units = [Unit(node, gpu, work)]
        name = f"team-{number}-{index}"
        team.append(TrueHolder(name, f"uid-{number}-{index}", start, end, "team", units, f"batch/v1/Job/team-{number}"))
    return team


def draw_holders(random: Random, end: float) -> list[TrueHolder]:
    """Every GPU has one holder after another. Some hold one or two whole nodes, and some are pods of one Job."""
    holders: list[TrueHolder] = []
    free = {(node, gpu): random.uniform(0, 1800) for node in range(NODES) for gpu in range(GPUS)}
    while min(free.values()) < end:
        (node, gpu), start = min(free.items(), key=lambda item: item[1])
        pattern, kind = (one := random.choice(PATTERNS)), one.__name__
        number = len(holders)
        places = [(node, gpu)]
        if not holders:  # at least one holder per day that is idle for long
            pattern, kind = forgotten, "idle"
        elif number > 1 and random.random() < 0.15:  # one member of the gang works, the others wait for it
            kind = "gang"
            nodes = random.sample(range(NODES), random.choice((1, 2)))
            places = [(each, index) for each in nodes for index in range(GPUS)]
            start = max(free[place] for place in places)
        elif number == 1 or random.random() < 0.12:
            kind = "team"
            places = random.sample(sorted(free), random.choice((2, 3, 4)))
            start = max(free[place] for place in places)
        length = random.choice((1200.0, 7200.0, 20_000.0, 40_000.0)) if number > 1 else 40_000.0
        until = min(end, start + length * random.uniform(0.8, 1.2))
        if until - start < 60:
            free |= dict.fromkeys(places, end)
            continue
        if kind == "team":
            holders += draw_team(random, number, places, start, until)
            free |= dict.fromkeys(places, until + random.uniform(10, 1800))
            continue
        name = str(1000 + number) if random.random() < 0.4 else f"pod-{number}"
        same_name = kind == "forgotten" and not name.isdigit() and random.random() < 0.5
        lives = int((until - start) / 2400) if same_name else 1  # recreated every 40 min under its name
        for life in range(max(1, lives)):
            begin = start + life * 2400 if lives > 1 else start
            stop = begin + 2395 if lives > 1 else until
            holder = TrueHolder(name, f"uid-{number}-{life}", begin, stop, kind)
            works = random.randrange(len(places))
            for index, (on, which) in enumerate(places):
                busy = kind != "gang" or index == works
                chosen = training if kind == "gang" else pattern
                work = chosen(random, begin, stop) if busy else []
                holder.units.append(Unit(on, which, work, hidden=random.random() < 0.1))
            if kind == "preparing":
                holder.host = on_cpus(random, begin, stop)
            holders.append(holder)
        free |= dict.fromkeys(places, until + random.uniform(10, 1800))
    return holders


class Exporter:
    """The exporter of one node: the real ledger and state file, read once a minute."""

    def __init__(self, random: Random, node: int, directory: Path, end: float) -> None:
        self.random, self.node, self.path = random, node, directory
        directory.mkdir()
        self.restarts = sorted(random.uniform(0, end) for _ in range(3))
        # Readings that fail for some minutes, and exporters that are down.
        self.unread = [(at, at + random.uniform(10, 1500)) for at in (random.uniform(0, end) for _ in range(2))]
        self.away: list[Interval] = []
        self.ledger = Ledger(RULES, 0.0)
        self.state = StateFile(directory, 10.0, "boot")
        self.state.acquire()

    def poll(self, now: float, holders: list[TrueHolder]) -> None:
        """Advance by five seconds."""
        if self.restarts and now >= self.restarts[0]:
            self.restarts.pop(0)
            self.away.append((now, now + self.random.uniform(10, 50)))
        if self.away and now < self.away[-1][1]:
            return
        if self.away and now - POLL_S < self.away[-1][1]:
            self.ledger = Ledger(RULES, now)
            assert self.state.restore(self.ledger) == ""
        confirmed = []
        for holder in holders:
            if not holder.start <= now < holder.end:
                continue
            for unit in holder.units:
                if unit.node != self.node:
                    continue
                key = UnitId(f"GPU-n{self.node}-{unit.gpu}")
                if not any(begin <= now < end for begin, end in self.unread):
                    self.ledger.record(Activity(key, (self.span(unit, now),), witnesses=3))
                confirmed.append(ConfirmedAllocation(Allocation(key, holder.holder()), now, None))
        self.ledger.charge_poll(now, now, confirmed)
        if self.restarts and now + 10 >= self.restarts[0] and now % 10 == 0:  # every 10 s; only the last write matters
            self.state.commit(self.state.prepare(self.ledger))

    def span(self, unit: Unit, now: float) -> Span:
        """The reading of the last five seconds."""
        start = now - POLL_S
        busy = unit.busy_s(start, now)
        if unit.hidden:
            return Span(start, now, 0.0, ("pcie",) if busy else (), 3)
        return Span(start, now, busy / POLL_S, (), 3)

    def is_up(self, now: float) -> bool:
        return not any(begin <= now < end for begin, end in self.away)


def simulate(random: Random, directory: Path) -> Day:
    """The whole day."""
    end = 60.0 * MINUTES
    world, holders = World(MINUTES), draw_holders(random, end)
    exporters = [Exporter(random, node, directory / f"n{node}", end) for node in range(NODES)]
    scraped: list[set[int]] = [set() for _ in exporters]
    pages: dict[tuple[int, int], str] = {}
    held: list[list[TrueHolder]] = []
    for now in range(POLL_S, int(end) + 1, POLL_S):
        if now % 60 == POLL_S:  # for each node, the holders in this minute
            present = [holder for holder in holders if holder.start < now + 60 and holder.end > now - 60]
            held = [[h for h in present if any(unit.node == node for unit in h.units)] for node in range(NODES)]
        for exporter, there in zip(exporters, held, strict=True):
            exporter.poll(now, there)
            if now % 60 == 0 and exporter.is_up(now) and random.random() > 0.01:
                scraped[exporter.node].add(now // 60)
                pages[exporter.node, now // 60] = scrape(world, exporter, there, now)
    for node in range(NODES):
        Node(world, f"n{node}", gpus=GPUS, uuid="GPU-{name}-{index}", scraped=lambda t, n=node: t in scraped[n])
    disturbed = [[*exporter.unread, *((a, b + 60) for a, b in exporter.away)] for exporter in exporters]
    return Day(world, holders, disturbed, pages)


def scrape(world: World, exporter: Exporter, holders: list[TrueHolder], now: int) -> str:
    """Put the series of every allocation into the world. Returns the metrics page."""
    knows_host = not any(end <= now < end + HOST_BLIND_S for _, end in exporter.away)
    page = [f"gpu_exporter_last_sample_timestamp_seconds {now}", f"gpu_exporter_sample_interval_seconds {POLL_S}"]
    for holder in holders:
        for unit in holder.units if holder.start <= now < holder.end else ():
            if unit.node != exporter.node:
                continue
            key = UnitId(f"GPU-n{unit.node}-{unit.gpu}")
            totals = exporter.ledger.holder_totals(Allocation(key, holder.holder()), now, now)
            if totals is None:
                continue
            who = (
                {"scheduler": "slurm", "job_id": holder.name}
                if holder.is_job
                else {"scheduler": "kubernetes", "namespace": "ml", "pod": holder.name, "container": "main"}
            )
            labels = {"gpu": str(unit.gpu), "uuid": key.uuid, **who}
            values = {
                "gpu_allocation_held_seconds_total": totals.held_s,
                "gpu_allocation_observed_seconds_total": totals.observed_s,
                "gpu_allocation_busy_seconds_total": totals.busy_s,
                "gpu_allocation_idle_seconds_total": totals.idle_s,
                "gpu_allocation_idle_run_seconds": totals.idle_run_s,
                "gpu_allocation_idle_run_witnesses": float(totals.idle_run_witnesses),
                "gpu_allocation_idle_gap_longest_seconds": totals.longest_gap_s or None,
                "gpu_allocation_start_timestamp_seconds": totals.start_wall,
                "gpu_allocation_holder_units": float(len(holder.units)),
                "gpu_allocation_share_ratio": 1.0,
                "gpu_allocation_info": 1.0,
                "gpu_allocation_host_activity_ratio": holder.host_ratio(now) if knows_host and holder.host else None,
            }
            for name, value in values.items():
                world.set(name, {"job": "gpu-exporter", "node": f"n{unit.node}", **labels}, now // 60, value)
                more = {"pod_uid": holder.uid} if name.endswith("info") and not holder.is_job else {}
                text = ",".join(f'{label}="{each}"' for label, each in {**labels, **more}.items())
                page += [f"{name}{{{text}}} {value!r}"] if value is not None else []
    return "\n".join(page) + "\n"


def stretches(day: Day) -> Iterator[tuple[TrueHolder, Interval, float]]:
    """Every period in which no GPU of a holder worked, and the time since which it was known without a break."""
    for holder in day.holders:
        for start, end in holder.idle_stretches(day.disturbed):
            ends = [b for unit in holder.units for a, b in day.disturbed[unit.node] if a < end and b > start]
            yield holder, (start, end), max([start, *(min(end, each) for each in ends)])
