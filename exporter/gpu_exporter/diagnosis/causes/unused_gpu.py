"""The holder uses fewer GPUs than it holds. The reason is unknown."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import IDLE, CauseCase, Needs, rule
from gpu_exporter.diagnosis.causes.cpu_work import works_on_cpus

SPINS_S = 60.0  # a GPU in a run without progress of this length does not work, since any work ends the run


@rule(
    states=IDLE,
    needs="the utilization and the processes of all GPUs of the holder on the node",
    against="a process has the unused GPU open and may use it later, or processes are not visible (lower confidence)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    used = [each for each in case.members if (each.utilization or 0.0) > 0.0]
    if any(each.spin is not None and each.spin.run_s >= SPINS_S for each in used):
        return None  # those may wait for this one
    if not used or len(case.members) < 2:
        return None
    is_proven = case.processes == 0.0 and all((each.processes or 0.0) > 0.0 for each in used)
    is_same = bool(case.seen) and all(each.ranks == 1 for each in case.seen)  # it works on another GPU
    against = ""
    is_late = case.processes is None and works_on_cpus(case)
    if is_late:
        against = "its processes use many CPUs: it may prepare data for the other GPUs"
    elif case.processes is None:
        against = "processes on GPUs are not visible, so this GPU may have one"
    elif case.processes:
        against = "a process on this GPU may use it later; programs also open a context on each GPU that they see"
    return Cause(
        "unused_gpu",
        HIGH if is_proven else LOW if is_late or (case.processes and not is_same) else MEDIUM,
        f"{len(used)} of its {len(case.members)} GPUs here work, and this one is idle"
        + (" and has no process" if is_proven else ""),
        against=against,
        values=numbers(used_gpus=float(len(used)), gpus=float(len(case.members))),
    )
