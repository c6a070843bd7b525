"""Replays recorded evidence through the rules, and scores them: precision, recall, specificity.

python -m tests.workloads.score     prints each script with its truth and what was found
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.causes import LOW, Causes
from gpu_exporter.common.model.evidence import FileEvidence, HostEvidence, ProcessEvidence
from gpu_exporter.common.model.training import TrainingPace
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.causes.numbers import cause_rules
from gpu_exporter.diagnosis.causes.rules import find_causes
from gpu_exporter.diagnosis.state import Window, judge_state, state_rules
from gpu_exporter.diagnosis.training.files import TrainingFiles
from gpu_exporter.diagnosis.training.pace import NodeTraining
from gpu_exporter.diagnosis.training.reports import parse_report

RECORDS = Path(__file__).resolve().parents[1] / "fixtures" / "causes" / "records.jsonl.gz"
HOOK_RECORDS = RECORDS.with_name("hook.jsonl.gz")  # the same kind, whose loops also reported by the hook
BOOTSTRAPS = 2000
SEED = 37
OLD_S, NEW_S = 7200.0, 300.0  # how long a holder has held its GPU


class Scored(NamedTuple):
    """One script. `found`: causes of at least medium confidence, the first one first."""

    script: str
    truth: frozenset[str]
    hard: bool
    state: str
    causes: Causes
    found: tuple[str, ...]


def read_records(path: Path = RECORDS) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def strip_names(evidence: HostEvidence) -> HostEvidence:
    """The same evidence from an older PyTorch, JAX or Ray, which name no threads."""
    if evidence.processes is None:
        return evidence
    return evidence._replace(processes=evidence.processes._replace(named_loaders=0, notebook=False))


def read_pace(record: dict[str, Any]) -> TrainingPace | None:
    """What the exporter makes of the loop's report; None without one."""
    reports = [parse_report(json.dumps(each).encode(), 0.0) for each in record.get("training", ())]
    if not reports:
        return None
    training, who = NodeTraining(), ("job", "1")
    training.note(who, TrainingFiles(0.0, tuple(reports)))
    view = training.view(who, UnitId("GPU-0"), (UnitId("GPU-0"),), 0.0, None)
    return None if view is None else view.pace


def replay(
    record: dict[str, Any],
    change: Callable[[HostEvidence], HostEvidence] = lambda each: each,
    *,
    with_hook: bool = False,
) -> Scored:
    """One record through the state and the causes. `with_hook`: with what its loop reported."""
    window_s = record["looks"][-1]["end"]
    settings = Settings()
    rules = state_rules(settings)._replace(window_s=window_s)
    held_s = NEW_S if record["is_new"] else OLD_S
    windows = [
        Window(
            values=values,
            held_s=window_s,
            idle_run_s=window_s if not any(values) else 0.0,
            processes=float(contexts),
            lag_s=0.0,
        )
        for values, contexts in zip(record["utilization"], record["contexts"], strict=True)
    ]
    subject = record["subject"]
    state = judge_state(windows[subject], rules).state
    looks = []
    for each in record["looks"]:
        evidence = change(_evidence(each))
        share = len(record["utilization"][0]) / window_s
        part = [values[int(evidence.start * share) : int(evidence.end * share)] for values in record["utilization"]]
        known = [value for values in part for value in values]
        looks.append(HostLook(evidence, sum(known) / len(known) if known else None))
    gpus = tuple(
        HeldGpu(f"GPU-{index}", str(index), _mean(window.values), window.processes, window.idle_run_s)
        for index, window in enumerate(windows)
    )
    case = CauseCase(
        state=state,
        uuid=f"GPU-{subject}",
        held_s=held_s,
        worked=False if record["is_new"] else _mean(windows[subject].values) > 0.0,
        idle_run_s=windows[subject].idle_run_s,
        mean=_mean(windows[subject].values),
        processes=windows[subject].processes,
        members=gpus,
        looks=tuple(looks),
        link=1.0,
        training=read_pace(record) if with_hook else None,
        rules=cause_rules(settings),
    )
    causes = find_causes(case)
    found = tuple(cause.name for cause in causes.ranked if cause.confidence != LOW)
    return Scored(record["script"], frozenset(record["truth"]), record["hard"], state, causes, found)


def _evidence(values: dict[str, Any]) -> HostEvidence:
    processes, files = values["processes"], values["files"]
    if processes is not None:
        known = {name: value for name, value in processes.items() if name in ProcessEvidence._fields}
        processes = ProcessEvidence(**{**known, "far": tuple(map(tuple, processes["far"]))})
    kinds = values["network_files"]
    return HostEvidence(
        **{
            **{name: value for name, value in values.items() if name in HostEvidence._fields},
            "processes": processes,
            "files": FileEvidence(**files) if files is not None else None,
            "network_files": None if kinds is None else tuple(kinds),
        }
    )


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


class Score(NamedTuple):
    """Shares, None if there is nothing to divide by."""

    precision: float | None
    recall: float | None


def score(scored: Iterable[Scored]) -> Score:
    """Over scripts: how many of the causes named first are true, and how many of the faults are named at all."""
    several = list(scored)
    named = [each for each in several if each.found]
    faulty = [each for each in several if each.truth]
    right = sum(each.found[0] in each.truth for each in named)
    hit = sum(len(each.truth & set(each.found)) / len(each.truth) for each in faulty)
    return Score(right / len(named) if named else None, hit / len(faulty) if faulty else None)


def interval(scored: Sequence[Scored], read: Callable[[Score], float | None]) -> tuple[float, float]:
    """The 95 % interval by drawing scripts with repetition."""
    rng = random.Random(SEED)
    values = [
        value for _ in range(BOOTSTRAPS) if (value := read(score(rng.choices(scored, k=len(scored))))) is not None
    ]
    values.sort()
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]


def specificity(scored: Iterable[Scored], *, hard: bool) -> tuple[int, int]:
    """Healthy scripts without a named cause, and all healthy scripts of this kind."""
    healthy = [each for each in scored if not each.truth and each.hard == hard]
    return sum(not each.found for each in healthy), len(healthy)


def expected_precision(scored: Sequence[Scored], faulty: float) -> float:
    """The precision on a cluster where this share of the jobs is faulty, half of the others hard."""
    ill = [each for each in scored if each.truth]
    right = sum(bool(each.found) and each.found[0] in each.truth for each in ill) / len(ill)
    wrong = sum(bool(each.found) and each.found[0] not in each.truth for each in ill) / len(ill)
    alarms = [1.0 - quiet / all_ for quiet, all_ in (specificity(scored, hard=hard) for hard in (False, True))]
    false = faulty * wrong + (1.0 - faulty) * sum(alarms) / 2
    true = faulty * right
    return true / (true + false)


if __name__ == "__main__":
    for one in map(replay, read_records()):
        mark = "ok " if (set(one.found[:1]) <= one.truth and (one.found or not one.truth)) else "BAD"
        print(mark, one.script, sorted(one.truth), one.state, [(c.name, c.confidence) for c in one.causes.ranked])
