"""Random hosts with several tenants: who gets which CPU and which page, and what the kernel shows of it to one holder.

A model of its own, written from docs/causes.md and the records of evidence alone, without a look at the rules: who writes
a rule must not write its adversaries. CPUs are given by water-filling: by weight, up to demand, quota and cpuset; in
a holder equally to its threads. A thread that gets less than it asks for is runnable all the time that it does not sleep;
from this follow pressure, throttled periods, runnable threads and lost CPUs. Memory is short at the own limit or on the
whole node, or is merely full of page cache. What limits the holder is judged from what it asked for and what it was given;
a host on which two shortages blend is drawn again. A fair share of the CPUs is the share of the GPUs: of those of the host
where neighbours are accused, of those that are held where the holder is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.common.model.evidence import HostEvidence, ProcessEvidence

LOOKS, PERIOD_S, GIB = 12, 5.0, float(1 << 30)
READ_THREADS, READ_PROCESSES = 256, 512  # docs/causes.md: how many of the two busiest, and of all, are looked at
HOSTS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
QUOTAS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 7.5, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
SERVED, MILD, FAR_BELOW, FEW, MANY = 0.98, 0.74, 0.8, 2.5, 4.0  # a host between two of these is ambiguous
ANY, CALM, PRESSED = "none all quota cpuset pair high", "alone light half busy", "fair hogs greedy system"
BOTH = f"{CALM} {PRESSED}"
# What is short; the situation, and how often it is drawn; the work; limits; neighbours; memory.
RECIPES: tuple[tuple[str, str, float, str, str, str, str], ...] = (
    ("own cpu", "loaders in a quota", 3.5, "loaders", "quota", BOTH, ""),
    ("own cpu", "loaders in a cpuset", 3.5, "loaders", "cpuset cpuset pair", BOTH, ""),
    ("own cpu", "loaders fill the host", 2, "loaders", "none all", "alone light", ""),
    ("own cpu", "loaders at their fair share", 2, "loaders", "none all", "fair", ""),
    ("own cpu", "in the loop under a tiny quota", 1, "in loop", "tiny", CALM, ""),
    ("neighbours cpu", "loaders beside tenants without gpus", 2.5, "loaders", "none all", "hogs", ""),
    ("neighbours cpu", "loaders beside greedy gpu tenants", 2.5, "loaders", "none all", "greedy", ""),
    ("neighbours cpu", "loaders beside a daemon", 2, "loaders", "none all", "system", ""),
    ("neighbours cpu", "a limit above what is free", 3, "loaders", "high quota", "hogs greedy system", ""),
    ("neighbours cpu", "neighbours in the same cpuset", 2, "loaders", "shared", "hogs greedy", ""),
    ("own memory", "working set over the limit", 3, "waiting", ANY, CALM, "own"),
    ("own memory", "mapped data over the limit", 2.5, "waiting", ANY, CALM, "mapped"),
    ("own memory", "killed at the limit", 3, "waiting", ANY, CALM, "oom"),
    ("own memory", "over the limit, busy host", 2.5, "keeping up", ANY, PRESSED, "own oom soft"),
    ("neighbours memory", "reclaim of the node", 4, "waiting", ANY, f"{CALM} hogs", "node"),
    ("neighbours memory", "killed by the node", 4, "keeping up", ANY, f"{CALM} hogs", "node-oom"),
    ("neighbours memory", "reclaim beside a notebook", 2, "notebook", ANY, CALM, "node"),
    ("too few", "few loaders, no limit", 4, "few", "none all", CALM, ""),
    ("too few", "few loaders, limit not reached", 4, "few", "quota cpuset pair", BOTH, ""),
    ("too few", "few loaders, host nearly full", 3, "few", "none all high", "busy", ""),
    ("too few", "few loaders, hardly a CPU free", 2, "few", "close", CALM, ""),
    ("too few", "no loaders", 1.5, "in loop", ANY, CALM, ""),
    ("threads", "threads of ranks in a quota", 2.5, "openmp", "quota pair", f"{CALM} hogs", ""),
    ("threads", "threads of ranks in a cpuset", 2, "openmp", "cpuset", f"{CALM} hogs", ""),
    ("threads", "threads of ranks fill the host", 2.5, "openmp", "none all", "fair alone light", ""),
    ("threads", "many loaders", 2.5, "loaders", "quota cpuset", CALM, ""),
    ("threads", "loaders with threads", 2, "nested", "quota cpuset none", "alone light fair", ""),
    ("none", "server", 6, "server", ANY, BOTH, ""),
    ("none", "notebook", 2.5, "notebook", ANY, BOTH, ""),
    ("none", "computes on cpus", 3, "engine", ANY, CALM, ""),
    ("none", "loaders wait", 6, "waiting", ANY, BOTH, ""),
    ("none", "loaders keep up", 6, "keeping up", ANY, BOTH, ""),
    ("none", "bursts in a quota that is enough", 3, "keeping up", "close", CALM, ""),
    ("none", "evaluation", 2, "evaluation", ANY, BOTH, ""),
    ("none", "actors", 2.5, "actors", ANY, f"{CALM} hogs", ""),
    ("none", "tokenizer", 2.5, "tokenizer", ANY, CALM, ""),
    ("none", "brief processes", 2.5, "brief", ANY, CALM, ""),
)  # fmt: skip


class DrawnHost(NamedTuple):
    """One holder and the looks at it. `short` and `usable` are the truth: what limits it, and CPUs that the kernel would
    give it now if it asked for all. `share`, `held`: GPUs of the holder, and of anybody, of the GPUs of the host.
    """

    kind: str
    state: str
    mean: float
    share: float
    held: float
    looks: tuple[HostEvidence, ...]
    short: str
    usable: float


class Task(NamedTuple):
    """A process: each of its `threads` uses `each` of a CPU if it never waits for one, and `disk` of the time waits for I/O;
    `asleep` more threads sleep. Role `gone`: processes that live too briefly to be seen.
    """

    role: str
    each: float
    threads: int = 1
    disk: float = 0.0
    asleep: int = 0


class Work(NamedTuple):
    """`hungry`: the GPU waits for what these processes do on CPUs. `idle`: how often the GPU does nothing at all."""

    tasks: list[Task]
    hungry: bool = False
    named: bool = False
    idle: float = 0.0
    remote: bool = False  # reads from a network file system

    @property
    def asks(self) -> float:
        return sum(task.each * task.threads for task in self.tasks)


class Tenant(NamedTuple):
    demand: float  # within its own limit
    weight: float
    gpus: int
    where: str = "both"  # CPUs of the holder ("same"), the others ("else"), both


class Site(NamedTuple):
    """`pool`: CPUs on which the holder may run. `slack`: share of the CPUs that a real scheduler leaves idle on a full host.
    `slice_s`: how long a thread keeps its CPU while others wait. `lag`: how long a wakeup waits on a full host, by the time
    that it then runs. `lumpy`: how much demand differs between periods of the quota. `shows`: what can be read here.
    """

    cpus: int
    gpus: int
    mine: int
    pool: int
    quota: float
    weight: float
    tenants: list[Tenant]
    slack: float
    slice_s: float
    lag: float
    lumpy: float
    shows: frozenset[str]

    @property
    def limit(self) -> float:
        return min(self.quota, self.pool)

    @property
    def entitled(self) -> float:
        return min(self.limit, self.cpus * self.mine / self.gpus)

    @property
    def held(self) -> int:
        return self.mine + sum(tenant.gpus for tenant in self.tenants)


class Memory(NamedTuple):
    short: str
    limit: float | None
    used: float
    cache: float
    some: float
    full: float
    refaults: float
    kills: frozenset[int] = frozenset()


def fill(room: float, asks: Sequence[tuple[float, float]]) -> list[float]:
    """Water-filling: each of (demand, weight) gets its demand, or as much per weight as all that get less."""
    given, weights = [0.0] * len(asks), sum(weight for _, weight in asks)
    for number in sorted(range(len(asks)), key=lambda i: asks[i][0] / asks[i][1]):
        demand, weight = asks[number]
        given[number] = min(demand, max(0.0, room) * weight / weights)
        room, weights = room - given[number], weights - weight
    return given


def give(site: Site, asked: float, loads: Sequence[float] = (), slack: float = 0.0) -> tuple[float, list[float], float]:  # fmt: skip
    """CPUs of the holder, of each tenant, and of all tenants among those on which the holder may run.
    Who may run anywhere goes first to the CPUs that the holder cannot use.
    """
    loads = loads or [1.0] * len(site.tenants)
    asks = [(tenant.demand * load, tenant.weight) for tenant, load in zip(site.tenants, loads, strict=True)]
    outside = [i for i, tenant in enumerate(site.tenants) if tenant.where != "same"]
    inside = [i for i, tenant in enumerate(site.tenants) if tenant.where != "else"]
    given = [0.0] * len(asks)
    for i, part in zip(outside, fill((site.cpus - site.pool) * (1 - slack), [asks[i] for i in outside]), strict=True):
        given[i] = part
    wanted = [(min(asked, site.quota), site.weight), *((asks[i][0] - given[i], asks[i][1]) for i in inside)]
    mine, *parts = fill(site.pool * (1 - slack), wanted)
    for i, part in zip(inside, parts, strict=True):
        given[i] += part
    return mine, given, sum(parts)


def share_out(work: Work, given: float) -> list[tuple[Task, float, float]]:
    """Processes, their CPUs, and how often each of their threads runs or waits for a CPU. Threads of a holder are equal."""
    parts = fill(given, [(task.each * task.threads, task.threads) for task in work.tasks])
    rows = list[tuple[Task, float, float]]()
    for task, part in zip(work.tasks, parts, strict=True):
        got = part / task.threads  # a thread sleeps as long per computation as ever
        rows.append((task, part, max(got, 1 - got * (1 - task.each) / task.each)))
    return rows


def judge(site: Site, work: Work, memory: Memory) -> str | None:
    """What limits the holder; None if two shortages blend, or a shortage is mild."""
    asked, room = work.asks, give(site, math.inf)[0]
    given, others, beside = give(site, asked)
    if given >= SERVED * asked:
        if memory.short:
            return memory.short if asked <= 0.85 * room else None
        if work.hungry:  # free by what neighbours use now, not only by what they would have to give
            return "too few" if min(room, site.limit, site.pool - beside) - given >= 1 else None
        return "none" if asked <= 0.93 * room else None
    if memory.short or given > MILD * asked or not work.hungry:
        return None
    fair = site.cpus / site.held
    most = [max(1.05 * fair * tenant.gpus, 0.03 * site.cpus) for tenant in site.tenants]
    is_within = all(used <= own for used, own in zip(others, most, strict=True))
    is_own = is_within and given >= 0.93 * min(fair * site.mine, site.pool)
    is_own |= site.limit < site.cpus and given >= 0.95 * site.limit
    crowd = sum(task.threads * chance for task, _, chance in share_out(work, given)) / max(given, site.entitled)
    if crowd > FEW:
        return "threads" if is_own and crowd >= MANY else None
    return "own cpu" if is_own else "neighbours cpu" if given <= FAR_BELOW * site.entitled else None


def draw_site(draw: random.Random, limit: str, crowd: str) -> Site:
    is_shared = crowd in ("fair", "greedy")
    gpus = draw.choice((2, 3, 4, 4, 6, 8, 8) if is_shared else (1, 2, 3, 4, 4, 6, 8, 8))
    cpus = draw.choice([n for n in HOSTS if n >= 2 * gpus])
    mine = 1 if draw.random() < 0.4 else draw.randint(1, gpus - is_shared)
    pool, quota, free = cpus, math.inf, gpus - mine
    weight = float(mine if crowd == "fair" else draw.choice((mine, mine, 1, cpus * mine / gpus)))
    if limit == "tiny":
        quota = draw.choice((0.3, 0.4, 0.5, 0.6))
    elif limit in ("quota", "pair"):
        quota = draw.choice([n for n in QUOTAS if n <= 0.75 * cpus])
    elif limit == "high":
        quota = max(1, round(cpus * min(1.5, mine / gpus * draw.uniform(0.7, 4))))
    if limit in ("cpuset", "pair", "shared"):
        pool = max(1, min(cpus - 1, round(cpus * draw.choice((mine / gpus, 0.25, 0.5, draw.random())))))
        quota = min(quota, pool) if limit == "pair" else quota
    where = {"cpuset": "else", "pair": "else", "shared": draw.choice(("same", "same", "both"))}.get(limit, "same")
    room = {"else": cpus - pool, "same": pool, "both": cpus}[where]
    owned = [0] * (0 if crowd == "alone" else draw.randint(1, 7))
    for _ in range(0 if not owned or crowd == "hogs" else free if draw.random() < 0.6 else draw.randint(0, free)):
        owned[draw.randrange(len(owned))] += 1
    loads = {"light": draw.uniform(0.02, 0.25), "half": draw.uniform(0.3, 0.65), "busy": draw.uniform(0.7, 0.92)}
    total, parts = room * loads.get(crowd, draw.uniform(1, 2.5)), [draw.uniform(0.2, 1) for _ in owned]
    heavy = weight if crowd in ("hogs", "greedy") else 1
    tenants = [
        Tenant(total * part / sum(parts), heavy * draw.choice((0.3, 1, 1, 2, 8)), n, where)
        for part, n in zip(parts, owned, strict=True)
    ]
    if crowd == "fair":  # weights by GPUs, as requests are
        tenants = [Tenant(room * n / gpus * draw.uniform(1, 1.6), n, n, where) for n in owned if n]
    elif crowd == "system":  # one daemon of the host, which is no tenant
        tenants = [Tenant(total, weight * draw.uniform(0.5, 6), 0, where)]
    if where == "same" and pool < cpus:
        tenants.append(Tenant((cpus - pool) * draw.uniform(0, 0.7), 1, 0, "else"))
    tenants.append(Tenant(cpus * draw.uniform(0.002, 0.02), 4, 0))  # kubelet, slurmd, monitoring
    psi = draw.random() < 0.66  # version 2 of cgroups, with few exceptions
    chances = {
        "psi": psi,
        "ooms": 0.2 + psi,
        "processes": 0.92,
        "ranks": 0.96,
        "refaults": 0.93,
        "whole": limit == "all",
    }
    shows = frozenset(name for name, chance in chances.items() if draw.random() < chance)
    times = draw.uniform(0.002, 0.035), draw.uniform(0.003, 0.01), draw.uniform(0.02, 0.12), draw.uniform(0.3, 1.2)
    return Site(cpus, gpus, mine, pool, quota, weight, tenants, *times, shows)


def draw_work(draw: random.Random, name: str, aim: float, gpus: int) -> Work:
    """`aim`: CPUs to ask for, or where nothing is short, the CPUs that the kernel would give."""
    uniform, choice = draw.uniform, draw.choice

    def group(n: float, low: float, high: float, disk: float = 0.0, threads: int = 1, role: str = "loader") -> list[Task]:  # fmt: skip
        each, count, asleep = uniform(low, high), max(1, min(600, round(n))), choice((0, 4, 16))
        own = [min(1.0, each * uniform(0.93, 1.07)) for _ in range(count)]
        return [Task(role, part, threads, min(disk * uniform(0.7, 1.2), 1 - part), asleep) for part in own]

    ranks = [Task("rank", n.each, 1, 0, choice((8, 60, 90, 200))) for n in group(gpus, 0.1, 0.7)]
    few = [Task("other", choice((0.001, 0.01, 0.05)), 1, 0, 12) for _ in range(draw.randint(0, 4))]  # loggers
    named, width, disk = draw.random() < 0.63, choice((4, 8, 16, 32)), choice((0.0, 0.5, 0.8))
    full = group(gpus, 0.93, 1, role="rank")
    works = {
        "loaders": lambda: Work(ranks + few + group(max(1, aim - 0.4 * gpus) / 0.88, 0.75, 1, choice((0, 0, 0.2))), True, named, 0.1),
        "in loop": lambda: Work(full + few, True),
        "few": lambda: Work(ranks + few + group(gpus * choice((1, 1, 2, 3, 4)), 0.88, 1, 0.05), True, named),
        "openmp": lambda: Work(  # pools of threads in the ranks
            few + group(gpus, 0.8, 1, 0, max(2, math.ceil(aim / gpus)), "rank") + group(uniform(1, 2 * gpus), 0.05, 0.3), True, named, 0.25),
        "nested": lambda: Work(ranks + few + group(aim / width, 0.7, 1, 0, width), True, named),  # and in the loaders
        # Loaders wait for a disk, a network file system, or (not seen as I/O) an object store.
        "waiting": lambda: Work(ranks + few + group(uniform(0.5, 6) * gpus, 0.05, 0.35, disk), False, named, 0, disk > 0 and width > 8),
        # The queue is full: a small model, or one that waits for its peers on other nodes.
        "keeping up": lambda: Work(ranks + few + group(uniform(0.5, 4) * gpus, 0.2, choice((0.4, 0.6, 0.95))), False, named),
        "server": lambda: Work(
            [*ranks, *few, Task("other", choice((0.05, 0.5, 1)), choice((1, 1, 3)), 0, 60), *group(width / 4, 0.01, 0.5)], idle=0.3),
        "notebook": lambda: Work([Task("rank", choice((0.001, 0.3, 1, 1)), 1, 0, choice((10, 140))), *few], idle=0.6),
        # Layers or experts on CPUs, search, simulation: many threads, and a CPU for each.
        "engine": lambda: Work(few + group(1, 0.6, 1, 0, max(1, int(aim * uniform(0.3, 0.8))), "rank"), idle=0.2),
        "evaluation": lambda: Work(full + few + group(uniform(1, 6) * gpus, 0.001, 0.03), False, named, 0.3),
        "actors": lambda: Work(ranks + few + group(aim * uniform(0.3, 0.9), 0.4, 0.98)),
        "tokenizer": lambda: Work(ranks + few + group(1, 0.5, 1, 0, max(1, int(aim * uniform(0.1, 0.7)))), idle=0.4),
        "brief": lambda: Work(ranks + few + group(aim * uniform(0.1, 0.7), 0.8, 1, role="gone"), idle=0.3),  # compilers
    }  # fmt: skip
    return works[name]()


def draw_memory(draw: random.Random, style: str) -> Memory:
    limit = draw.choice((4, 8, 16, 32, 64, 128, 256, 512)) * GIB
    cap = limit if draw.random() < 0.65 else None
    if style == "plain":
        used = limit * draw.uniform(0.05, 0.85)
        return Memory("", cap, used, used * draw.uniform(0.05, 0.8), draw.uniform(0, 0.003), 0, draw.choice((0, 0, 5)))
    if style == "cache":  # clean pages go as fast as they come; a long epoch reads some of them again
        used = limit * draw.uniform(0.97, 1)
        cache, some = used * draw.uniform(0.3, 0.9), draw.uniform(0, 0.012)
        return Memory("", limit, used, cache, some, 0, draw.choice((0, 20, 400)))
    kills = frozenset(draw.sample(range(LOOKS), draw.randint(1, 4)) if "oom" in style else ())
    some, cache = draw.uniform(0, 0.4) if kills else draw.uniform(0.12, 0.9), draw.uniform(0.02, 0.4)
    full = some * draw.uniform(0.15, 0.9)
    if style.startswith("node"):
        used, refaults = limit * draw.uniform(0.02, 0.5), 10 ** draw.uniform(1.5, 4.5)
        return Memory("neighbours memory", cap, used, used * cache, some, full / 2, refaults, kills)
    used = limit * draw.uniform(
        *((0.82, 0.92) if style == "soft" else (0.985, 1))
    )  # soft: memory.high below memory.max
    cache = used * (draw.uniform(0.5, 0.9) if style == "mapped" else cache / 2)
    return Memory("own memory", limit, used, cache, some, full, 0 if kills else 10 ** draw.uniform(3, 5), kills)


def look_at(draw: random.Random, site: Site, work: Work, memory: Memory, number: int, start: float, load: float) -> HostEvidence:  # fmt: skip
    def noise(spread: float = 0.03) -> float:
        return max(0.0, draw.gauss(1, spread))

    loads = [0.3 if draw.random() < 0.04 else noise(0.05) for _ in site.tenants]
    work = work._replace(tasks=[task._replace(each=min(1.0, task.each * load)) for task in work.tasks])
    mine, others, beside = give(site, work.asks, loads, site.slack)
    free = site._replace(quota=math.inf)
    lag = 1.005 + site.lag * max(0.0, (min(1.0, (mine + beside) / site.pool) - 0.7) / 0.3) ** 2
    rows = [(task, part, min(1.0, chance * lag)) for task, part, chance in share_out(work, mine)]
    runnable = sum(task.threads * chance for task, _, chance in rows)
    throttled = None
    if site.quota < math.inf:  # throttled where it would use more in some periods
        spread = max(0.04, site.lumpy * math.sqrt(sum(t.threads * c * (1 - c) for t, _, c in rows)) / site.quota)
        excess = give(free, work.asks, loads, site.slack)[0] / site.quota - 1
        throttled = min(1.0, noise() * (0.5 + 0.5 * math.erf(excess / spread / math.sqrt(2))))
        throttled *= sum(task.threads for task in work.tasks) > site.quota
    # Threads lose a CPU to others only where CPUs are missing; while a quota is used up, all of them wait.
    lost = max(0.0, 1 - give(free, math.inf, loads, site.slack)[0] / max(runnable, 1e-9)) + (lag - 1) / 2
    disk = sum(task.disk for task in work.tasks) + (memory.full * 3 if memory.refaults > 1000 else 0)
    used = memory.used * (draw.uniform(0.6, 0.97) if memory.kills and number not in memory.kills else noise(0.004))
    used, refaults = min(used, memory.limit or math.inf), memory.refaults * noise(0.3)
    killed = draw.choice((1, 1, 1, 2, 9)) if number in memory.kills else 0  # 9: memory.oom.group
    tells_limit = site.pool < site.cpus or site.quota < math.inf or "whole" in site.shows  # a cpuset of all CPUs
    seen = draw.random() > 0.01 and "processes" in site.shows
    look = HostEvidence(
        start, start + PERIOD_S, cores=mine * noise(0.01), throttled=throttled,
        cpus=float(site.limit) if tells_limit else None, quota=site.quota if site.quota < math.inf else None,
        host_cpus=float(site.cpus), host_busy=min(1.0, (mine + sum(others)) / site.cpus * noise(0.01)) if draw.random() > 0.01 else None,
        memory_bytes=used, memory_limit=memory.limit, memory_cache=min(used, memory.cache * noise()),
        refaults=refaults if "refaults" in site.shows else None, killed=float(killed),
        ooms=float(min(killed, 1) * (memory.short == "own memory")) if "ooms" in site.shows else None,
        shm_bytes=draw.uniform(0, 0.3) * GIB, shm_limit=4 * GIB, written=draw.choice((0.0, 1e4, 1e6)),
        read=refaults * 4096 + (0.0 if work.remote else disk * 1e8 * noise(0.2)), network_files=("nfs4",) if work.remote else (),
        received=None if work.remote else draw.uniform(0, 1e7), sent=None if work.remote else draw.uniform(0, 1e6),
        processes=show(draw, site, work, rows, (throttled or 0.0, lost, memory.full if disk else 0.0)) if seen else None,
    )  # fmt: skip
    return look if "psi" not in site.shows else look._replace(
        pressure_cpu=min(1.0, noise() * (1 - (1 - 0.2 * (throttled or 0)) * math.exp(-1.2 * max(0.0, runnable - mine)))),
        pressure_io=min(1.0, noise(0.1) * (1 - math.exp(-disk))),
        pressure_memory=(some := min(1.0, memory.some * noise(0.3))), memory_full=min(some, memory.full * noise(0.2)),
    )  # fmt: skip


def show(draw: random.Random, site: Site, work: Work, rows: Sequence[tuple[Task, float, float]], waits: tuple[float, float, float]) -> ProcessEvidence:  # fmt: skip
    throttled, lost, stalls = waits
    every = [(task, part * draw.gauss(1, 0.02), chance) for task, part, chance in rows if task.role != "gone"]
    seen, idle = every[:READ_PROCESSES], draw.randint(0, 3)
    seen.sort(key=lambda row: -row[1])
    runnable, left, switches = 0, READ_THREADS, 0.0
    for place, (task, part, chance) in enumerate(seen):
        count = min(left, task.threads) if place < 2 else 1
        runnable += sum(draw.random() < chance for _ in range(count))
        if place < 2:
            left = max(0, left - task.threads - task.asleep)
            switches += part / task.threads / site.slice_s * min(1.0, lost) + 10 * throttled + draw.uniform(0, 2)
    on_gpu = [part for task, part, _ in seen if task.role == "rank"]
    named = [part for task, part, _ in seen if task.role == "loader"] if work.named else []
    has_ranks = "ranks" in site.shows
    found = named or [part for task, part, _ in seen if task.role != "rank" and part >= 0.002 and has_ranks]
    return ProcessEvidence(
        processes=min(READ_PROCESSES, len(every) + idle), is_all=len(every) + idle <= READ_PROCESSES,
        ranks=len(on_gpu) if has_ranks else None, rank_cores=max(on_gpu, default=0.0) if has_ranks else None,
        loaders=len(found) if named or has_ranks else None, named_loaders=len(named), loader_cores=sum(found),
        busy_loaders=sum(part >= 0.3 for part in found), full_loaders=sum(part >= 0.85 for part in found),
        loader_most=max(found, default=0.0), loader_bytes=draw.uniform(0.5, 3) * GIB if found else None, runnable=runnable,
        is_all_threads=sum(row[0].threads + row[0].asleep for row in seen[:2]) <= READ_THREADS, switches=switches,
        blocked=sum(draw.random() < max(task.disk, 0.5 * stalls) for task, _, _ in seen),
        terminal=work.idle > 0.5 and site.cpus % 3 == 0, notebook=work.idle > 0.5 and site.gpus > 2,
    )  # fmt: skip


def draw_host(draw: random.Random) -> DrawnHost:
    short, kind, _, name, limits, crowds, memories = draw.choices(RECIPES, [row[2] for row in RECIPES])[0]
    low, high = {"own cpu": (1.4, 2.4), "threads": (4.2, 16.0)}.get(short, (1.0, 1.0))
    while True:  # until the model says that this, and nothing else, is short
        crowd = draw.choice(crowds.split())
        site = draw_site(draw, limit := draw.choice(limits.split()), crowd)
        room = give(site, math.inf)[0]
        aim = max(room, site.entitled if short == "threads" else 0.0) * draw.uniform(low, high)
        if short == "neighbours cpu":
            aim = draw.uniform(1.4 * room, max(1.4 * room, 2.4 * site.entitled))
        memory = draw_memory(draw, draw.choice((memories or "plain plain cache").split()))
        work = draw_work(draw, name, aim, site.mine)
        if limit == "close":  # a quota just above what it uses
            site = site._replace(quota=max(work.asks / draw.uniform(0.78, 0.92), work.asks + 1.05 * work.hungry))
            room = give(site, math.inf)[0]
        if judge(site, work, memory) == short:
            break
    idle = 0.0 if short == "too few" else max(work.idle, 0.2 if memory.short else 0.0)
    state = draw.choices(("low", "bursty", "held_idle"), (0.75 * (1 - idle), 0.25 * (1 - idle), idle))[0]
    # It is fed no faster than its work gets CPUs; work in the loop leaves even less time to the GPU.
    slowest = 0.9 * give(site, work.asks)[0] / work.asks if "loaders" in name and "cpu" in short else 0.0
    mean = draw.uniform(0, 0.02) if state == "held_idle" else draw.uniform(max(0.1, 0.6 * slowest), 0.7)
    start, looks = draw.uniform(100, 1e6), list[HostEvidence]()
    for number in range(LOOKS):
        pause = draw.uniform(0.3, 0.7) if state == "bursty" and draw.random() < 0.3 else 1.0
        looks.append(look_at(draw, site, work, memory, number, start + PERIOD_S * number, pause * draw.gauss(1, 0.03)))
    kind += ", host full" if crowds == BOTH and crowd in PRESSED.split() else ""
    return DrawnHost(kind, state, mean, site.mine / site.gpus, site.held / site.gpus, tuple(looks), short, room)
