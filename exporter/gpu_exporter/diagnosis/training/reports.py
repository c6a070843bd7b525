"""Parses a job's report of its training. Pure. The input is not trusted: every value has a type and a limit."""

from __future__ import annotations

import re
from typing import Any

from gpu_exporter.common.model.training import Fact, RankReport
from gpu_exporter.common.outside import load_json, real, whole
from gpu_exporter.common.report_rules import (
    BETWEEN,
    ENDED,
    FORMAT,
    GPUS_MAX,
    INTERVAL_MAX_S,
    INTERVAL_S,
    KEYS,
    NUMBERS,
    PHASES,
    RANKS_MAX,
    SIZE_MAX,
    SWITCHES,
    WORDS,
)

STEPS_MAX = 10**15
SECONDS_MAX = 1e10  # more than three hundred years
RUN = re.compile(r"[0-9a-z]{1,32}")
UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")


def parse_report(data: bytes, age_s: float, name: str = "") -> RankReport:
    """Parses one report. Raises ValueError if the format or the number of steps is invalid.

    Unknown keys are ignored. Optional values that cannot be parsed become unknown. `name`: the file's name, which
    identifies the process if the report has no valid run.
    """
    if len(data) > SIZE_MAX:
        raise ValueError(f"longer than {SIZE_MAX} bytes")
    try:
        document = load_json(data.decode("utf-8"))
    except UnicodeDecodeError as exc:  # the text of exc would quote a byte of the file
        raise ValueError("it is not UTF-8") from exc
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT}")
    report = {key: document.get(key) for key in KEYS}
    steps = _whole(report["steps"], STEPS_MAX)
    if steps is None:
        raise ValueError("steps is not a whole number of 0 or more")
    measured = _whole(document.get("measured_steps", steps), steps)
    step_s = _seconds(report["step_seconds"]) if measured else None
    starved_s, worked_s = _seconds(report["gpu_wait_seconds"]), _seconds(report["gpu_work_seconds"])
    is_gpu = starved_s is not None and worked_s is not None
    run, process = report["run"], report["process"]
    return RankReport(
        run=run if isinstance(run, str) and RUN.fullmatch(run) else name,
        process=process if isinstance(process, str) and RUN.fullmatch(process) else "",
        steps=steps,
        age_s=max(0.0, age_s),
        interval_s=min(INTERVAL_MAX_S, max(INTERVAL_S, _seconds(report["interval_seconds"]) or INTERVAL_S)),
        has_ended=report["state"] == ENDED,
        is_between=report["state"] == BETWEEN,
        rank=_whole(report["rank"], RANKS_MAX),
        world_size=_whole(report["world_size"], RANKS_MAX),
        gpus=_read_gpus(report["gpus"]),
        measured=measured or 0,
        step_s=step_s,
        wait_s=_at_most(_seconds(report["wait_seconds"]), step_s),
        starved_s=starved_s if is_gpu else None,
        worked_s=worked_s if is_gpu else None,
        phases=_read_phases(report["phases"], is_gpu=is_gpu),
        is_gpu=is_gpu,
        facts=_read_facts(report["facts"]),
    )


def _whole(value: Any, most: int) -> int | None:
    return whole(value, most) if isinstance(value, int) else None


def _seconds(value: Any) -> float | None:
    found = real(value) if isinstance(value, int | float) else None
    return found if found is not None and 0.0 <= found <= SECONDS_MAX else None


def _at_most(value: float | None, most: float | None) -> float | None:
    """Returns the value, None if it exceeds `most`, the total that contains it."""
    return value if value is not None and most is not None and value <= most * 1.01 else None


def _read_gpus(value: Any) -> tuple[str, ...]:
    found = [each for each in value[:GPUS_MAX] if isinstance(each, str)] if isinstance(value, list) else []
    return tuple(dict.fromkeys(each for each in found if UUID.fullmatch(each)))


def _read_phases(value: Any, *, is_gpu: bool) -> dict[str, float]:
    """The seconds of each phase: GPU time if the report has it (`is_gpu`), otherwise wall time.

    Unknown phases are ignored.
    """
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
