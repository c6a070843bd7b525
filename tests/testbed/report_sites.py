"""Sites with known hours in a real server, and `gpu-exporter report` about them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.common.exits import Exit
from tests.testbed.history_servers import prometheus, write_blocks
from tests.testbed.processes import Processes
from tests.testbed.site_series import Site

UNTIL = "2025-06-02T00:00Z"
Hours: TypeAlias = float | tuple[float, float] | None  # exact, or at least and at most


class Truth(NamedTuple):
    """What a report must say.

    - `hours`: GPU-hours of the site by part. `present`, `taken` and `free` are those of the capacity.
    - `holders`: the same by holder. All of them, if there is one.
    - `told`: patterns of lines about what is left out, missing, or what a source cannot do.
    """

    hours: Mapping[str, Hours]
    holders: Mapping[str, Mapping[str, Hours]] = {}
    told: tuple[str, ...] = ()


class Case(NamedTuple):
    build: Callable[[Site], Truth]
    hours: float
    interval: float
    flags: tuple[str, ...]


Build: TypeAlias = Callable[[Site], Truth]


def add(cases: dict[str, Case], hours: float = 6, interval: float = 30, *flags: str) -> Callable[[Build], Build]:
    """Adds a site to the cases, by the name of the function that builds it."""

    def decorate(build: Build) -> Build:
        cases[build.__name__] = Case(build, hours, interval, flags)
        return build

    return decorate


def report(url: str, hours: float, path: Path, *flags: str) -> dict[str, Any]:
    """Runs the command."""
    code = COMMANDS["report"].run([
        f"--source.prometheus={url}", f"--since={hours:.0f}h", f"--until={UNTIL}", "--no-trend", "--rest=0",
        "--format=json", f"--output={path}", *flags,
    ])  # fmt: skip
    assert code == Exit.DONE
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def check(report: Mapping[str, Any], truth: Truth) -> None:
    shown = hours_of(report["total"]) | {"cost": report["total"]["cost"]}
    names = {"present": "present_hours", "taken": "held_hours", "free": "free_hours"}
    for name, of in names.items():
        values = [each[of] for each in report["capacity"]]
        shown[name] = None if None in values else sum(values)
    wrong = [*differ("", shown, truth.hours)]
    holders = {each["holder"]: hours_of(each) for each in report["holders"]}
    if truth.holders:
        wrong += [f"{name}: not a holder" for name in holders.keys() - truth.holders.keys()]
    for name, hours in truth.holders.items():
        wrong += differ(f"{name}: ", holders.get(name, {}), hours)
    lines = report["left_out"] + report["missing"] + [line for each in report["sources"] for line in each["cannot"]]
    wrong += [f"not told: {text}" for text in truth.told if not any(re.search(text, line) for line in lines)]
    for each in (report["total"], *report["holders"]):
        parts = [each[f"{part}_hours"] or 0.0 for part in ("used", "low", "idle", "unproven", "unknown")]
        assert sum(parts) == pytest.approx(each["held_hours"], abs=1e-6)
    assert not wrong, (wrong, shown, holders, lines)


def hours_of(row: Mapping[str, Any]) -> dict[str, float | None]:
    found = {part: row[f"{part}_hours"] for part in ("held", "used", "low", "idle", "unproven", "unknown")}
    return {**found, "work": found["used"] + found["low"]}


def differ(of: str, shown: Mapping[str, float | None], truth: Mapping[str, Hours]) -> Iterator[str]:
    """What is not within a scrape or one percent of the truth."""
    for name, hours in truth.items():
        least, most = hours if isinstance(hours, tuple) else (hours, hours)
        value = shown.get(name)
        if value is None or least is None or most is None:
            if value is not least:
                yield f"{of}{name} {value}, not {least}"
        elif not least * 0.99 - 0.02 <= value <= most * 1.01 + (0.02 if most else 1e-9):
            yield f"{of}{name} {value:.3f}, not {least:.3f} to {most:.3f}"


@contextmanager
def serve(directory: Path, cases: Mapping[str, Case]) -> Iterator[tuple[str, Mapping[str, Truth]]]:
    """A Prometheus with all cases, each with its own value of the label cluster: its address, and their truths."""
    sites = {name: Site(each.hours, name, each.interval) for name, each in cases.items()}
    truths = {name: cases[name].build(site) for name, site in sites.items()}
    write_blocks(directory, (line for site in sites.values() for line in site.lines))
    with Processes(directory) as processes:
        yield prometheus(processes, directory).url, truths


def check_case(name: str, case: Case, server: tuple[str, Mapping[str, Truth]], output: Path) -> None:
    """Asks the server for a report about this case, and compares it with its truth."""
    url, truths = server
    matcher = f'--source.matcher=cluster=~"{name}(-.+)?"'
    check(report(url, case.hours, output, matcher, *case.flags), truths[name])
