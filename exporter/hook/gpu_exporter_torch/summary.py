"""Makes the summary at the end of a training. The summary shows the waits of the steps, and the settings to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_exporter_torch.report_rules import (
    ADVICE,
    LONG_S,
    OWN_PART,
    PHASE_MIN,
    STEPS_MIN,
    TAKING,
    WAIT_MIN,
    WHOLE_MIN,
    LateRank,
    Loading,
    RankTime,
    SpentTime,
    advise_phase,
    bound_gain,
    find_late,
    propose_workers,
)

START_MIN = 0.1  # share of the loop's time in the start of workers, from which this is worth a change


def render_summary(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]], loop_s: float) -> str:
    """Returns the summary as text. `others`: reports of other ranks here. `loop_s`: seconds since the loop began."""
    spent, step_s = spent_time(report), report["step_seconds"]
    name = f" on rank {report['rank']} of {report['world_size']}" if report["world_size"] > 1 else ""
    if not spent.is_enough:
        return (
            f"gpu-exporter: INCOMPLETE: {report['steps']} steps{name}, of which {spent.steps} were measured; "
            f"{STEPS_MIN} are needed, or {WHOLE_MIN} that take {LONG_S:.0f} s in total. The first 5 steps, and steps "
            "under a profiler, are not measured" + _why_incomplete(report) + "\n"
        )
    coverage = min(1.0, (step_s + report["start_seconds"]) / loop_s) if loop_s > 0.0 else 0.0
    lines = [
        f"gpu-exporter: {report['steps']} steps{name}, {spent.each_s * 1e3:.4g} ms each "
        f"(median {report['median_step_seconds'] * 1e3:.4g} ms); {coverage:.0%} of the loop's time measured"
    ]
    lines += _shares(report, spent)
    lines += [f"  change: {text}" for text in advise(report)]
    if (late := find_late_rank([report, *others])) is not None and late.text:
        lines.append(f"  {late.text}")
    return "\n".join(lines) + "\n"


def _why_incomplete(report: Mapping[str, Any]) -> str:
    if not report["batches"]:
        return (
            ". The loop took no batch from the observed loader: call observe on the loader that the framework returns"
        )
    if report["steps"] == 0 and report["optimizer_steps"] == 0:
        return ". The hook saw no step of the optimizer: call mark_step() after each step"
    return ""


def spent_time(report: Mapping[str, Any]) -> SpentTime:
    waited, worked = report["gpu_wait_seconds"], report["gpu_work_seconds"]
    key = "seconds" if waited is None or worked is None else "gpu_seconds"
    phase_s = {name: each[key] for name, each in (report["phases"] or {}).items() if each[key] is not None}
    return SpentTime(report["measured_steps"], report["step_seconds"], report["wait_seconds"], waited, worked, phase_s)


def _shares(report: Mapping[str, Any], spent: SpentTime) -> list[str]:
    lines = [f"  wait for data    {report['wait_seconds'] / report['step_seconds']:4.0%}"]
    if spent.is_gpu:
        lines[0] += f"   this wait left the GPU without work in {spent.wait:.0%} of the time"
    else:
        lines[0] += "   it is unknown whether a GPU worked during this wait"
    if report["phases"] is None:
        return [*lines, "  phases           not measured; to measure them: phases=True"]
    shares = spent.phases
    lines += [f"  {name:16s} {f'{shares[name]:4.0%}' if name in shares else 'null'}" for name in report["phases"]]
    if all(phase["seconds"] is None for phase in report["phases"].values()):
        lines.append("  no phase was found: the hook cannot look into compiled, sharded or DeepSpeed steps")
    return lines


def advise(report: Mapping[str, Any]) -> list[str]:
    """Lists the proposed changes, each with the present value, the proposed value, and the upper bound of the gain."""
    found: list[str] = []
    facts, spent = report["facts"], spent_time(report)
    if spent.wait is not None and spent.wait >= WAIT_MIN:
        found.append(_advise_loader(report, spent))
    start_share = report["start_seconds"] / (spent.step_s + report["start_seconds"])
    if report["epochs"] > 1 and start_share >= START_MIN and facts.get("persistent_workers") is False:
        what = "persistent_workers False -> True: each epoch waited for new workers"
        found.append(f"{what}; {bound_gain(start_share)} as fast")
    for name, share in spent.phases.items():
        if name in ADVICE and share >= PHASE_MIN[name]:
            text, gain = advise_phase(name, share)
            if name == "host_to_device" and facts.get("pin_memory") is False:
                text = "pin_memory False -> True, and copy with non_blocking=True"
            found.append(f"{text}; {name} takes {share:.0%} of the steps; {gain} as fast")
    if facts.get("data_parallel"):
        found.append("DataParallel -> DistributedDataParallel, one process for each GPU: one process feeds all GPUs")
    return found


def read_loading(report: Mapping[str, Any], spent: SpentTime) -> Loading | None:
    """Returns the costs of loading from a report. None if the loop does not use a DataLoader."""
    workers, cpus = report["facts"].get("num_workers"), report["facts"].get("cpus")
    if workers is None or not report["batches"]:
        return None
    batch_s = spent.each_s * report["steps"] / max(1, report["batches"] - report["unfinished_batches"])
    own_wait_s = batch_s * min(1.0, report["wait_seconds"] / report["step_seconds"])
    own = None if cpus is None else cpus / max(1, report.get("local_world_size") or 1)
    work_s = batch_s * (1.0 - (spent.wait or 0.0))
    cpu_s, delay_s, take_s, loop_s = map(
        report.get, ("make_cpu_seconds", "make_delay_seconds", "take_cpu_seconds", "loop_cpu_seconds")
    )
    if not workers:  # the loop makes it, and takes nothing
        loop_s, take_s = None if loop_s is None else max(0.0, loop_s - (cpu_s or 0.0)), None
    return Loading(workers, batch_s, own_wait_s, max(work_s, 1e-6), cpu_s, delay_s, take_s, loop_s, own)


def find_proposal(report: Mapping[str, Any]) -> dict[str, int]:
    """Returns the fact `workers_to_try`: the number of workers that the summary advises. Empty if it advises none."""
    spent = spent_time(report)
    if not spent.is_enough or spent.wait is None or spent.wait < WAIT_MIN:
        return {}
    loading = read_loading(report, spent)
    found = None if loading is None else propose_workers(loading)
    return {} if found is None or found.number is None else {"workers_to_try": found.number}


def _advise_loader(report: Mapping[str, Any], spent: SpentTime) -> str:
    loading = read_loading(report, spent)
    if loading is None:
        return f"make the loader faster: load batches in other processes, ahead of the loop; {_bound(spent)}"
    found, workers = propose_workers(loading), loading.workers
    cpu = "" if loading.cpu_s is None else f" ({loading.cpu_s * 1e3:.3g} ms on a CPU)"
    made = f"making a batch takes {loading.make_s * 1e3:.3g} ms{cpu}, using it {loading.work_s * 1e3:.3g} ms"
    if found is None:
        return (
            "try more workers, or make each sample cheaper: whether CPUs limit the workers is unknown, "
            f"because they ended too soon or cannot be read; {_bound(spent)}"
        )
    if found.limit == TAKING:
        return (
            f"make fewer, larger batches: in each wait, {(loading.take_s or 0.0) * 1e3:.3g} ms are the loop's "
            "own work of taking the batch from a worker"
        )
    if found.number is None:
        cpus = "the CPUs" if loading.cpus is None else f"{loading.cpus:.3g} CPUs"
        return (
            f"ask for more CPUs: {workers} workers and the loop share {cpus}; or make each sample cheaper (decode "
            f"once, smaller files, transforms on the GPU); {_bound(spent)}"
        )
    gain = loading.batch_s / found.batch_s
    part = OWN_PART if report["facts"].get("iterable") else ""
    return f"num_workers {workers} -> {found.number}: {made}; about {gain:.1f} times as fast, and more memory{part}"


def _bound(spent: SpentTime) -> str:
    return f"{bound_gain(spent.wait or 0.0)} as fast"


def find_late_rank(reports: Sequence[Mapping[str, Any]]) -> LateRank | None:
    """Finds the rank for which the other ranks on this node wait. None if they cannot be compared."""
    return find_late([RankTime(each["rank"], each["world_size"], spent_time(each)) for each in reports])
