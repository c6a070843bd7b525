"""The summary at the end of a training: what the steps waited for, and which setting to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

CONFIDENT = 20  # measured steps; fewer say nothing certain (docs/torch.md, sources)
WAIT_SHARE = 0.1  # share of the step from which a wait is worth a change
PHASE_SHARES = {"checkpoint": 0.1, "logging": 0.1, "evaluation": 0.2, "host_to_device": 0.1}
START_SHARE = 0.1
LATE_SHARE = 0.1  # of a step: a rank that is later than the others by this is named


def render_summary(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]], loop_s: float) -> str:
    """Some lines for people. `others`: reports of the other ranks on this node. `loop_s`: since the loop began."""
    steps, step_s = report["measured_steps"], report["step_seconds"]
    name = f" on rank {report['rank']} of {report['world_size']}" if report["world_size"] > 1 else ""
    if steps < CONFIDENT or step_s <= 0.0:
        return (
            f"gpu-exporter: INCOMPLETE: {report['steps']} steps{name}, {steps} of them measured; "
            f"{CONFIDENT} are needed. The first 5 steps and those under a profiler are not measured"
            + _why_incomplete(report)
            + "\n"
        )
    coverage = min(1.0, (step_s + report["start_seconds"]) / loop_s) if loop_s > 0.0 else 0.0
    lines = [
        f"gpu-exporter: {report['steps']} steps{name}, {step_s / steps * 1e3:.4g} ms each "
        f"(median {report['median_step_seconds'] * 1e3:.4g} ms); {coverage:.0%} of the loop's time measured"
    ]
    lines += _shares(report)
    lines += [f"  change: {text}" for text in advise(report)]
    if (late := find_late_rank([report, *others])) is not None:
        lines.append(f"  {late}")
    return "\n".join(lines) + "\n"


def _why_incomplete(report: Mapping[str, Any]) -> str:
    if not report["batches"]:
        return ". The loop took no batch from the observed loader: observe the loader that the framework returns"
    if report["steps"] == 0 and report["optimizer_steps"] == 0:
        return ". The optimizer's step was never seen: call mark_step() after each step"
    return ""


def wait_share(report: Mapping[str, Any]) -> float:
    """Share of the steps in which the GPU had no work because the loop waited for data, 0 to 1.

    Without the GPU's own time line it is the share that the loop waited: the GPU may have worked meanwhile.
    """
    waited, worked = report["gpu_wait_seconds"], report["gpu_work_seconds"]
    if waited is not None and worked is not None and waited + worked > 0.0:
        return float(waited / (waited + worked))
    return float(report["wait_seconds"] / report["step_seconds"]) if report["step_seconds"] else 0.0


def _shares(report: Mapping[str, Any]) -> list[str]:
    step_s = report["step_seconds"]
    whole = (report["gpu_work_seconds"] or 0.0) + (report["gpu_wait_seconds"] or 0.0)
    is_gpu = whole > 0.0
    lines = [f"  wait for data    {report['wait_seconds'] / step_s:4.0%}"]
    if is_gpu:
        lines[0] += f"   the GPU had no work in {wait_share(report):.0%} of the time because of it"
    else:
        lines[0] += "   whether a GPU worked meanwhile is not known"
    if report["phases"] is None:
        return [*lines, "  phases           not placed (phases=True)"]
    for name, phase in report["phases"].items():
        seconds = phase["gpu_seconds"] if is_gpu else phase["seconds"]
        lines.append(f"  {name:16s} {'null' if seconds is None else f'{seconds / (whole if is_gpu else step_s):4.0%}'}")
    if all(phase["seconds"] is None for phase in report["phases"].values()):
        lines.append(
            "  no phase was placed: the hook does not look into compiled, sharded or DeepSpeed steps by itself"
        )
    return lines


def advise(report: Mapping[str, Any]) -> list[str]:
    """What to change, each with the present and the proposed value and the bound of the gain."""
    found: list[str] = []
    facts, share, step_s = report["facts"], wait_share(report), report["step_seconds"]
    if share >= WAIT_SHARE:
        found.append(f"{_advise_loader(facts, report.get('local_world_size'))}; {_bound(share)}")
    start_share = report["start_seconds"] / (step_s + report["start_seconds"])
    if report["epochs"] > 1 and start_share >= START_SHARE and facts.get("persistent_workers") is False:
        what = "persistent_workers False -> True: each epoch waited for new workers"
        found.append(f"{what}; {_bound(start_share)}")
    for name, least in PHASE_SHARES.items():
        phase = (report["phases"] or {}).get(name)
        if phase is not None and phase["seconds"] is not None and phase["seconds"] >= least * step_s:
            found.append(f"{_advise_phase(name, facts)}; {name} takes {phase['seconds'] / step_s:.0%} of the steps")
    if facts.get("data_parallel"):
        found.append("DataParallel -> DistributedDataParallel, one process for each GPU: one process feeds all GPUs")
    return found


def _bound(share: float) -> str:
    """What the loop would gain if this share of its time were gone."""
    return f"at most {1 / (1 - min(share, 0.99)):.1f} times as fast"


def _advise_loader(facts: Mapping[str, Any], ranks: int | None) -> str:
    workers, cpus = facts.get("num_workers"), facts.get("cpus")
    if workers is None:
        return "make the loader faster: load batches in other processes, ahead of the loop"
    if cpus is None:
        return f"num_workers {workers} -> more"
    own = cpus / max(1, ranks or 1)
    room = math.floor(own) - 1
    if room > workers:
        return f"num_workers {workers} -> {room}: this process may use {own:.3g} CPUs"
    return (
        f"ask for more CPUs: {workers} workers and the loop share {own:.3g} CPUs; or make each sample cheaper (decode "
        "once, smaller files, transforms on the GPU)"
    )


def _advise_phase(name: str, facts: Mapping[str, Any]) -> str:
    if name == "host_to_device" and facts.get("pin_memory") is False:
        return "pin_memory False -> True, and copy with non_blocking=True"
    return ADVICE[name]


ADVICE = {
    "checkpoint": "write checkpoints less often, or with torch.distributed.checkpoint.async_save",
    "logging": "log every 50 steps instead of each, and keep metrics on the GPU until then",
    "evaluation": "evaluate less often, or on fewer samples",
    "host_to_device": "copy with non_blocking=True, and less: convert types on the GPU",
}


def find_late_rank(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """The rank that the others wait for, as a text. Durations are compared, never clocks.

    In a collective operation all wait for the last: so the culprit waits least inside of it. Where the phase is not
    placed, the rank that waits most for its data is the culprit.
    """
    known = [each for each in reports if each["measured_steps"] >= CONFIDENT]
    if len(known) < 2:
        return None
    steps = {each["rank"]: each["step_seconds"] / each["measured_steps"] for each in known}
    step_s = sum(steps.values()) / len(steps)
    inside = {each["rank"]: seconds for each in known if (seconds := _collective_s(each)) is not None}
    if len(inside) == len(known):
        culprit = min(inside, key=lambda rank: inside[rank])
        others = sorted(seconds for rank, seconds in inside.items() if rank != culprit)
        late_s, how = others[len(others) // 2] - inside[culprit], "it waits least in the collective operations"
    else:
        waits = {each["rank"]: each["wait_seconds"] / each["measured_steps"] for each in known}
        culprit = max(waits, key=lambda rank: waits[rank])
        others = sorted(seconds for rank, seconds in waits.items() if rank != culprit)
        late_s, how = waits[culprit] - others[len(others) // 2], "it waits longest for its data"
    if late_s < LATE_SHARE * step_s:
        return None
    return f"rank {culprit} is late by {late_s * 1e3:.4g} ms of each step ({late_s / step_s:.0%}): {how}"


def _collective_s(report: Mapping[str, Any]) -> float | None:
    """Seconds of a step inside collective operations, by the GPU's time line if it has such a line."""
    phase = (report["phases"] or {}).get("collective")
    if phase is None or phase["seconds"] is None:
        return None
    steps = max(1, report["measured_steps"])
    return float((phase["gpu_seconds"] if phase["gpu_seconds"] is not None else phase["seconds"]) / steps)
