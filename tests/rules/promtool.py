"""Runs promtool to find the alerts of a world: the real engine evaluates hours in a second."""

from __future__ import annotations

import os
import re
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
    within: str = ""
    """A matcher of the clusters of the case, if its world is a part of another."""
    parts: Sequence[Case] = ()
    """Cases that were merged into this one. Its series and alerts are theirs."""

    def test(self) -> dict[str, Any]:
        """The case in the form of promtool's files."""
        checks = [check for each in self.parts or (self,) for check in each._checks()]
        if self.parts:  # no part would see an alert without a cluster
            homeless = self._firing('cluster=""', minutes=self.world.minutes + 1)
            checks.append((self.world.minutes, f"count({homeless})", []))
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

    def _firing(self, *matchers: str, minutes: int = 0) -> str:
        """The alerts that fire, or in how many of the last `minutes` each does."""
        series = ",".join(filter(None, ('alertstate="firing"', *matchers, self.within)))
        return f"count_over_time(ALERTS{{{series}}}[{minutes}m])" if minutes else f"ALERTS{{{series}}}"

    def _checks(self) -> Iterable[tuple[int, str, Sequence[tuple[str, float]]]]:
        if self.is_golden:
            yield from self.values
            return
        last = self.world.minutes
        names = sorted({each.alert for each in self.firing})
        others = f'alertname!~"{"|".join(names)}"' if names else 'alertname!=""'
        yield last, f"count by (alertname) ({self._firing(others, minutes=last + 1)})", []
        for name in names:
            mine = [each for each in self.firing if each.alert == name]
            sets = len({tuple(sorted(each.labels.items())) for each in mine})
            fires = self._firing(f'alertname="{name}"', minutes=last + 1)
            yield last, f"count({fires})", [("{}", sets)]
            minutes = sum(each.end - each.start + 1 for each in mine)
            yield last, f"sum({fires})", [("{}", minutes)]
        for each in self.firing:
            matchers = [f'{key}="{value}"' for key, value in {"alertname": each.alert, **each.labels}.items()]
            length = each.end - each.start + 1
            yield each.end, f"sum({self._firing(*matchers, minutes=length)})", [("{}", length)]
            if each.start:
                yield each.start - 1, f"count({self._firing(*matchers)})", []
        yield from self.values


CLUSTER = re.compile(r'\bcluster="([^"]*)"')
SELECTOR = re.compile(r"\b(?:\w+:[\w:]+|ALERTS|DCGM_\w+)(?![\w:])({?)")
AGGREGATED = re.compile(r"(?:round\()?(?:sum|count|min|max)\b(?! by \([^)]*cluster)(?!.*(\bor\b|__name__))", re.S)


def in_clusters_of_its_own(case: Case) -> Case | None:
    """The case with its name in the names of its clusters. None if that would change it.

    So do cases that need the whole Prometheus, which fails or monitors nothing, and values by cluster.
    """
    has_clusters = {bool(CLUSTER.search(name)) for name in case.world.series}
    if (
        case.is_golden
        or case.world.away
        or any(each.alert == "GpuMonitoringAbsent" for each in case.firing)
        or len(has_clusters) > 1
        or not all(AGGREGATED.match(expr) for _, expr, _ in case.values)
    ):
        return None
    cluster = re.sub(r"[^\w ,:;%-]", "_", case.name)  # no character has a meaning in a regular expression
    world = World(case.world.minutes)
    for name, row in case.world.series.items():
        own = CLUSTER.sub(rf'cluster="{cluster}/\1"', name)
        world.series[own if own != name else name.replace("{", f'{{cluster="{cluster}", ', 1)] = row
    within = f'cluster=~"{cluster}(/.*)?"' if True in has_clusters else f'cluster="{cluster}"'
    firing = []
    for each in case.firing:
        own_of = {"cluster": f"{cluster}/{each.labels['cluster']}"} if "cluster" in each.labels else {}
        firing.append(replace(each, labels={**each.labels, **own_of}))
    values = [
        (at, SELECTOR.sub(lambda name: f"{name[0].rstrip('{')}{{{within}{',' if name[1] else '}'}", expr), samples)
        for at, expr, samples in case.values
    ]
    return replace(case, world=world, firing=firing, values=values, within=within)


def merge(cases: Sequence[Case], most: int = 48, longest: int = 300) -> list[Case]:
    """Merge cases if possible: each gets clusters of its own, because no rule combines clusters.

    promtool then evaluates every rule once for all of them. Cases of more than `longest` minutes remain separate.
    """
    alone: list[Case] = []
    alike: dict[tuple[str, tuple[tuple[str, str], ...], int, int], list[Case]] = {}
    for case in cases:
        part = in_clusters_of_its_own(case)
        if part is None:
            alone.append(case)
        else:
            minutes = max(longest, part.world.minutes)
            alike.setdefault((part.optional, tuple(part.settings.items()), part._every_s, minutes), []).append(part)
    for same in alike.values():
        same.sort(key=lambda case: case.world.minutes)
        for start in range(0, len(same), most):
            parts = same[start : start + most]
            world = World(parts[-1].world.minutes)
            for part in parts:
                world.series |= part.world.series
            assert len(world.series) == sum(len(part.world.series) for part in parts), "two cases have one name"
            firing = [each for part in parts for each in part.firing]
            name = " + ".join(part.name for part in parts)
            alone.append(replace(parts[0], name=name, world=world, firing=firing, values=(), within="", parts=parts))
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
    command, env = [program, "test", "rules", str(path)], {**os.environ, "GOGC": "400"}  # a sixth of the CPU time less
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=env)
    return done.returncode == 0, done.stdout + done.stderr


Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
