"""A usage report with all parts, in which names from outside are hostile."""

from __future__ import annotations

from gpu_exporter.reports.usage.model import (
    PARTS,
    UNKNOWN,
    Capacity,
    CauseHours,
    Covered,
    GpuHours,
    HolderHours,
    LongIdle,
    ReportSource,
    UsageReport,
    Who,
)

EVIL = "<script>alert(1)</script>\x1b[31m\n\u202e"
DAY_S, HOUR_S = 86400.0, 3600.0
START = 1_795_392_000.0  # Monday 2026-11-23 00:00 UTC
GIB = 1024.0**3
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
PRICES = {H100: 4.5, A100: 2.0}


def use(price: float | None, busy: float | None, watts: float | None = None, **parts: float | None) -> GpuHours:
    """The hours of these parts; a part that is not named is 0."""
    hours = {part: parts.get(part, 0.0) for part in PARTS}
    held = sum(value or 0.0 for value in hours.values())
    costs = None if price is None else {part: None if of is None else of * price for part, of in hours.items()}
    known = held - (hours[UNKNOWN] or 0.0)
    return GpuHours(held, hours, busy, known, None if watts is None else watts * held / 1000.0, costs)


def kube(namespace: str, team: str, workload: str, model: str, user: str = "") -> Who:
    return Who("", "kubernetes", namespace, "", user, team, workload, "", model)


def slurm(account: str, user: str, model: str) -> Who:
    return Who("", "slurm", "", account, user, "", "", "", model)


def hours_of_a_week() -> dict[float, GpuHours | None]:
    """GPUs are idle at night and on the weekend; Wednesday from noon to 17 has no data."""
    found: dict[float, GpuHours | None] = {}
    for at in range(7 * 24):
        day, hour = divmod(at, 24)
        idle = 40.0 if day >= 5 else 28.0 if hour < 7 or hour >= 20 else 4.0 + (hour % 3)
        gap = day == 2 and 12 <= hour < 17
        found[START + at * HOUR_S] = None if gap else use(None, None, idle=idle, used=60.0 - idle, unproven=3.0)
    return found


def build_report(stranger: str = EVIL) -> UsageReport:
    """The report of a site with Kubernetes and Slurm. `stranger`: the name of a namespace, a team and more."""
    lines = {
        kube("vision", "vision", "train-resnet", H100): use(
            4.5, 1800.0, 400.0, starting=20.5, used=2100.0, low=310.0, idle=1480.0, unknown=35.0
        ),
        kube("vision", "vision", "notebook-ada", A100): use(2.0, 22.0, 90.0, used=60.0, idle=420.0, unproven=40.0),
        kube("nlp", "nlp", "llm-pretrain", H100): use(4.5, 3600.0, 620.0, used=3900.0, stalled=96.0, unknown=12.0),
        kube("nlp", "nlp", "serving", H100): use(4.5, 160.0, 200.0, used=400.0, unproven=600.0, low=300.0),
        kube(stranger, stranger, stranger, H100): use(4.5, 1.0, 100.0, idle=9.0, used=1.0),
        slurm("phys", "noor", A100): use(2.0, 300.0, 250.0, used=500.0, idle=220.0, faulty=14.0),
        slurm("phys", "mira", A100): use(2.0, 90.0, 210.0, used=200.0, idle=18.0, unknown=130.0),
        slurm("phys", "otto", A100): use(2.0, 55.0, 300.0, used=61.0),
        slurm("phys", "rhea", A100): use(2.0, 35.0, 300.0, used=41.0),
        slurm("chem", "=HYPERLINK(1)", A100): use(2.0, 12.0, 300.0, used=20.0, idle=0.4),
    }
    holders = [
        HolderHours(Who(scheduler="kubernetes", namespace="vision", team="vision", workload="train-resnet", holder="vision/train-resnet-3", model=H100), use(4.5, 100.0, used=200.0, idle=700.0), 61 * HOUR_S, None, 0.11),
        HolderHours(Who(scheduler="kubernetes", namespace="vision", team="vision", workload="notebook-ada", holder="vision/notebook-ada-0", model=A100), use(2.0, 22.0, used=60.0, idle=420.0, unproven=40.0), 40 * HOUR_S),
        HolderHours(Who(scheduler="slurm", account="phys", user="noor", holder="job 102", model=A100), use(2.0, 10.0, used=30.0, idle=118.0), 12.5 * HOUR_S),
        HolderHours(Who(scheduler="kubernetes", namespace=stranger, team=stranger, holder=f"{stranger}/pod", model=H100), use(4.5, 1.0, idle=9.0, used=1.0), 9 * HOUR_S),
        HolderHours(Who(scheduler="kubernetes", namespace="nlp", team="nlp", workload="serving", holder="nlp/serving-0", model=H100), use(4.5, 80.0, used=68.0, unproven=100.0), None, 12_000),
    ]  # fmt: skip
    days = {START + at * DAY_S: use(None, None, used=1000.0 + 10 * at, idle=300.0, unproven=90.0) for at in range(7)}
    return UsageReport(
        START,
        START + 7 * DAY_S,
        [
            ReportSource(
                "dcgm-exporter", "200 GPUs of 25 nodes, by pod", ("energy of MIG instances: no counter exists",)
            ),
            ReportSource("kube-state-metrics", "requests of pods in the phase Running"),
        ],
        Covered(6.8 * DAY_S, 7 * DAY_S, None, 0.004),
        lines,
        hours_of_a_week(),
        {**days, START + 2 * DAY_S: None},
        use(None, None, used=8000.0, idle=1500.0, unproven=500.0),
        holders,
        [Capacity("", H100, 13440.0, 9263.5, 4176.5), Capacity("", A100, 3360.0, 1724.4, None)],
        [holders[1]._replace(mean=0.04, peak_memory=3.2 * GIB, sufficient="1g.5gb")],
        {0.0: 1990.0, 0.001: 2147.4, 0.01: 2300.5},
        [
            CauseHours(kube("vision", "", "", ""), "cpu_quota", 312.3),
            CauseHours(slurm("phys", "noor", ""), stranger, 12.0),
        ],
        [LongIdle("", "vision", "marked", 800.0), LongIdle("", stranger, "exempt", 40.0)],
        ["12.0 GPU-hours: gaps of more than 5 minutes", "3 holders with a single sample, 0.1 GPU-hours"],
        ["team of 2 namespaces: they have no label team"],
        "EUR",
        0.001,
    )
