"""Runs promtool to find the alerts of a world: the real engine evaluates hours in a second."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from tools.rules import build_all

from gpu_exporter.common.config.defaults import Alerts
from tests.rules.world import World


@dataclass(frozen=True)
class Firing:
    """One alert that fires from minute `start` to `end` without a break. `labels`: distinguish it from others."""

    alert: str
    start: int
    end: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Case:
    """A world, all alerts that fire in it, and values of expressions at some minutes."""

    name: str
    world: World
    firing: Sequence[Firing] = ()
    values: Sequence[tuple[int, str, Sequence[tuple[str, float]]]] = ()
    about: Sequence[str] = ()
    """Alerts and recordings that the case is about, besides those that fire: a change of one of them runs the case."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the rules with values other than their defaults."""
    optional: str = ""
    """Files of rules/optional to load too."""
    every_s: int = 0
    """Seconds between two samples; 0: as this source is usually scraped. A minute of the world has one of 60 s or more."""
    is_golden: bool = False
    """The values contain all recordings and firing alerts."""

    def test(self) -> dict[str, Any]:
        """The case in the form of promtool's files."""
        checks = list(self._checks())
        return {
            "name": self.name,
            "interval": f"{self._every_s}s",
            "input_series": self.world.input_series(max(1, 60 // self._every_s)),
            "promql_expr_test": [
                {
                    "expr": expr,
                    "eval_time": f"{at}m",
                    "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
                }
                for at, expr, samples in checks
            ],
        }

    @property
    def _every_s(self) -> int:
        return self.every_s or (30 if "source-dcgm" in self.optional else 60)

    def _checks(self) -> Iterable[tuple[int, str, Sequence[tuple[str, float]]]]:
        if self.is_golden:
            yield from self.values
            return
        last = self.world.minutes
        names = sorted({each.alert for each in self.firing})
        others = f'alertname!~"{"|".join(names)}"' if names else 'alertname!=""'
        every = f'ALERTS{{alertstate="firing",{others}}}[{last + 1}m]'
        yield last, f"count by (alertname) (count_over_time({every}))", []
        for name in names:
            mine = [each for each in self.firing if each.alert == name]
            sets = len({tuple(sorted(each.labels.items())) for each in mine})
            series = f'ALERTS{{alertstate="firing",alertname="{name}"}}[{last + 1}m]'
            yield last, f"count(count_over_time({series}))", [("{}", sets)]
            minutes = sum(each.end - each.start + 1 for each in mine)
            yield last, f"sum(count_over_time({series}))", [("{}", minutes)]
        for each in self.firing:
            matchers = "".join(f',{key}="{value}"' for key, value in each.labels.items())
            series = f'ALERTS{{alertstate="firing",alertname="{each.alert}"{matchers}}}'
            length = each.end - each.start + 1
            yield each.end, f"sum(count_over_time({series}[{length}m]))", [("{}", length)]
            if each.start:
                yield each.start - 1, f"count({series})", []
        yield from self.values


def merge(cases: Sequence[Case], most: int = 12) -> list[Case]:
    """Merge cases if possible: each gets its own cluster, because no rule combines clusters.

    promtool then evaluates every rule once for all of them. Cases remain separate if they check values, have clusters, or
    are about monitoring or a Prometheus that is down as a whole.
    """
    alone: list[Case] = []
    alike: dict[tuple[int, str, tuple[tuple[str, str], ...], int], list[Case]] = {}
    for case in cases:
        whole = any(each.alert == "GpuMonitoringAbsent" for each in case.firing)
        if case.values or whole or case.world.away or any('cluster="' in name for name in case.world.series):
            alone.append(case)
        else:
            alike.setdefault(
                (case.world.minutes, case.optional, tuple(case.settings.items()), case.every_s), []
            ).append(case)
    for (minutes, *_), same in alike.items():
        for start in range(0, len(same), most):
            part, world, firing = same[start : start + most], World(minutes), []
            for case in part:
                for name, row in case.world.series.items():
                    world.series[name.replace("{", f'{{cluster="{case.name}", ', 1)] = row
                firing += [replace(each, labels={**each.labels, "cluster": case.name}) for each in case.firing]
            alone.append(replace(part[0], name=" + ".join(case.name for case in part), world=world, firing=firing))
    return alone


def as_file(tests: Sequence[Mapping[str, Any]], rules: Path) -> dict[str, Any]:
    """A promtool file. A group is evaluated after the groups that it reads."""
    paths = sorted(rules.glob("*.yaml"), key=lambda path: (path.stem != "seam", path.stem))
    groups = [group["name"] for path in paths for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return {
        "rule_files": [str(path) for path in paths],
        "evaluation_interval": "1m",
        "group_eval_order": groups,
        "tests": list(tests),
    }


def build(directory: Path, settings: Mapping[str, str], optional: str = "") -> Path:
    """Write the rules with these parameters and optional files to `directory`."""
    directory.mkdir(exist_ok=True)
    for name, text in build_all(Alerts(), settings).items():
        path = Path(name)
        if path.parent == Path() or path.stem in optional.split():
            (directory / path.name).write_text(text, encoding="utf-8")
    return directory


def run(cases: Sequence[Case], directory: Path, rules: Path, program: str = "promtool") -> tuple[bool, str]:
    """Whether all cases hold with these rules, and promtool's output."""
    path = directory / "cases.yaml"
    text = as_file([case.test() for case in cases], rules)
    path.write_text(yaml.dump(text, sort_keys=False, width=10_000_000, Dumper=Dumper), encoding="utf-8")
    done = subprocess.run(
        [program, "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=900
    )
    return done.returncode == 0, done.stdout + done.stderr


Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
