"""Prints the firing alerts of a case as ranges of minutes: python -m tests.rules.show [PART OF A NAME]"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Container
from pathlib import Path

import yaml

from gpu_exporter.common.durations import parse_duration
from tests.rules.cases import all_cases
from tests.rules.promtool import Case, Dumper, as_file, build


def observe(
    case: Case, expr: str = 'ALERTS{alertstate="firing"}', files: Container[str] | None = None
) -> dict[str, list[int]]:
    """Minutes in which each series of `expr` exists. promtool prints the result if the test expects none.

    `files`: the rules to load, by default all rules of the case.
    """
    test = case.test()
    test["promql_expr_test"] = [
        {"expr": expr, "eval_time": f"{t}m", "exp_samples": []} for t in range(case.world.minutes + 1)
    ]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "show.yaml"
        rules = build(Path(name) / "rules", case.settings, case.optional)
        for unused in [each for each in rules.iterdir() if files is not None and each.stem not in files]:
            unused.unlink()
        path.write_text(yaml.dump(as_file([test], rules), width=10_000_000, Dumper=Dumper))
        done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    found: dict[str, list[int]] = {}
    if "parse error" in done.stdout + done.stderr:
        print(done.stdout + done.stderr)
    for span, got in re.findall(r"time: (\w+),\n\s*exp: .*\n\s*got: (.*)", done.stdout + done.stderr):
        t = int(parse_duration(span) / 60)
        for series in re.findall(r"(\w*\{.*?\}) [-+0-9.eEIaN]+(?:,|$)", got):
            found.setdefault(series, []).append(t)
    return found


def ranges(minutes: list[int]) -> str:
    parts: list[list[int]] = []
    for t in minutes:
        if parts and t == parts[-1][1] + 1:
            parts[-1][1] = t
        else:
            parts.append([t, t])
    return ", ".join(f"{a}-{b}" for a, b in parts)


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for each in all_cases():
        if wanted in each.name:
            print(f"== {each.name}")
            for series, minutes in observe(each, *sys.argv[2:]).items():
                print(f"   {ranges(minutes)}  {series}")
