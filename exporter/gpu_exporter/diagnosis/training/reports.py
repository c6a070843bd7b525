"""Parses what a job wrote about its training. Pure. The bytes are hostile: every value has a type and a limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpu_exporter.common.model.training import PHASES, Fact, RankReport
from gpu_exporter.common.outside import load_json, real, whole

FORMAT = "gpu-exporter-training/1"
SIZE_MAX = 65_536  # bytes of one file
STEPS_MAX = 10**15
SECONDS_MAX = 1e10  # more than three hundred years
INTERVAL_S, INTERVAL_MAX_S = 10.0, 600.0  # how often the file is written; the hook writes to slow storage less often
RANKS_MAX = 1_000_000
GPUS_MAX = 16
RUN = re.compile(r"[0-9a-z]{1,32}")
UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")
WORDS: Mapping[str, frozenset[str]] = {
    "parameters": frozenset(("float32", "float16", "bfloat16")),
    "precision": frozenset(("float32", "float16", "bfloat16", "mixed")),
    "matmul": frozenset(("highest", "high", "medium")),
}
NUMBERS: Mapping[str, int] = {
    "num_workers": 10_000,
    "prefetch_factor": 10_000,
    "batch_size": 10**9,
    "cpus": 100_000,
}
SWITCHES = frozenset(("pin_memory", "persistent_workers", "data_parallel", "compiled"))


def parse_report(data: bytes, age_s: float, name: str = "") -> RankReport:
    """One report. Unknown keys are ignored, optional values that are not understood are unknown. `name`: of its file,
    which identifies a process that names no run.

    Raises ValueError if the format or the number of steps is not understood.
    """
    if len(data) > SIZE_MAX:
        raise ValueError(f"longer than {SIZE_MAX} bytes")
    try:
        report = load_json(data.decode("utf-8"))
    except UnicodeDecodeError as exc:  # its text would have a byte of the file
        raise ValueError("it is not UTF-8") from exc
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT}")
    steps = _whole(report.get("steps"), STEPS_MAX)
    if steps is None:
        raise ValueError("steps is not a number of steps")
    measured = _whole(report.get("measured_steps", steps), steps)
    step_s = _seconds(report.get("step_seconds")) if measured else None
    starved_s, worked_s = _seconds(report.get("gpu_wait_seconds")), _seconds(report.get("gpu_work_seconds"))
    is_gpu = starved_s is not None and worked_s is not None
    run = report.get("run")
    return RankReport(
        run=run if isinstance(run, str) and RUN.fullmatch(run) else name,
        steps=steps,
        age_s=max(0.0, age_s),
        interval_s=min(INTERVAL_MAX_S, max(INTERVAL_S, _seconds(report.get("interval_seconds")) or INTERVAL_S)),
        has_ended=report.get("state") == "ended",
        is_between=report.get("state") == "between",
        rank=_whole(report.get("rank"), RANKS_MAX),
        world_size=_whole(report.get("world_size"), RANKS_MAX),
        gpus=_read_gpus(report.get("gpus")),
        measured=measured or 0,
        step_s=step_s,
        wait_s=_at_most(_seconds(report.get("wait_seconds")), step_s),
        starved_s=starved_s if is_gpu else None,
        worked_s=worked_s if is_gpu else None,
        phases=_read_phases(report.get("phases"), is_gpu=is_gpu),
        is_gpu=is_gpu,
        facts=_read_facts(report.get("facts")),
    )


def _whole(value: Any, most: int) -> int | None:
    return whole(value, most) if isinstance(value, int) else None


def _seconds(value: Any) -> float | None:
    found = real(value) if isinstance(value, int | float) else None
    return found if found is not None and 0.0 <= found <= SECONDS_MAX else None


def _at_most(value: float | None, most: float | None) -> float | None:
    """The value; None if it is larger than the whole that it should be a part of."""
    return value if value is not None and most is not None and value <= most * 1.01 else None


def _read_gpus(value: Any) -> tuple[str, ...]:
    found = [each for each in value[:GPUS_MAX] if isinstance(each, str)] if isinstance(value, list) else []
    return tuple(dict.fromkeys(each for each in found if UUID.fullmatch(each)))


def _read_phases(value: Any, *, is_gpu: bool) -> dict[str, float]:
    """Seconds by phase: the GPU's where it has a time line. Other names than those of the format are ignored."""
    found: dict[str, float] = {}
    for name in PHASES if isinstance(value, dict) else ():
        phase = value.get(name)
        seconds = _seconds(phase.get("gpu_seconds" if is_gpu else "seconds")) if isinstance(phase, dict) else None
        if seconds is not None:
            found[name] = seconds
    return found


def _read_facts(value: Any) -> dict[str, Fact]:
    if not isinstance(value, dict):
        return {}
    found: dict[str, Fact] = {}
    for name, most in NUMBERS.items():
        number = real(value.get(name)) if isinstance(value.get(name), int | float) else None
        if number is not None and 0 <= number <= most:
            found[name] = number if name == "cpus" else int(number)
    for name, words in WORDS.items():
        word = value.get(name)
        if isinstance(word, str) and word in words:
            found[name] = word
    for name in SWITCHES:
        switch = value.get(name)
        if isinstance(switch, bool):
            found[name] = switch
    return found
