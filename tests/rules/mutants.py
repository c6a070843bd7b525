"""Changes every threshold, guard, window, matcher and label list of the rules, one at a time: which one does no case notice?

    python -m tests.rules.mutants [PART OF A RULE'S NAME]

A change that nobody can notice is listed in equal.txt with its reason: `rule | change | reason`. Exit status 1 when a change
survives that is not listed there. An hour or two on two cores, so not in CI.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml
from alerts.build import build_all

from gpu_exporter.defaults import Alerts
from tests.rules.cases import all_cases
from tests.rules.promtool import Case, run
from tests.unit.test_rules import expressions, name_of

EQUAL = Path(__file__).with_name("equal.txt")
CHUNK = 6
NEXT = {">": "<", "<": ">", ">=": "<", "==": "!=", "!=": "=="}


class Mutant(NamedTuple):
    rule: str
    change: str
    field: str
    text: str


def mutants_of(rule: Mapping[str, Any]) -> Iterator[Mutant]:
    """Every changed form of one rule."""
    name = name_of(rule)
    tree = promql.parse(rule["expr"])
    text = write(tree)
    seen = {text}

    def changed(change: str, mutant: str) -> Iterator[Mutant]:
        promql.parse(mutant)  # raises ValueError: what is not PromQL would count as noticed
        if mutant not in seen:
            seen.add(mutant)
            yield Mutant(name, change, "expr", mutant)

    for node in expressions(tree):
        if isinstance(node, promql.BinaryExpr):
            here, op = write(node), str(node.op)
            if op in ("and", "unless"):
                yield from changed(
                    f"without `{op} {shorten(str(node.rhs))}`", text.replace(here, f"({write(node.lhs)})", 1)
                )
            if op == "or":
                yield from changed(
                    f"without `or {shorten(str(node.rhs))}`", text.replace(here, f"({write(node.lhs)})", 1)
                )
                yield from changed(
                    f"without `{shorten(str(node.lhs))} or`", text.replace(here, f"({write(node.rhs)})", 1)
                )
    for match in re.finditer(r"(?<![\w\"$.])(\d+(?:\.\d+)?)(?![\w\".])", text):
        for factor in (0.5, 2.0):
            value = float(match[1]) * factor or factor
            yield from changed(f"{match[1]} -> {value:g} at {match.start()}", splice(text, match, f"{value:g}"))
    for match in re.finditer(r"\[(\d+)([smhd])\]", text):
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
        for factor in (0.5, 2.0):
            yield from changed(
                f"{match[0]} -> {seconds * factor:g}s at {match.start()}",
                splice(text, match, f"[{seconds * factor:.0f}s]"),
            )
    for match in re.finditer(r"(?<=[\s)])(>=|==|!=|>|<)(?=\s)", text):
        yield from changed(f"{match[1]} -> {NEXT[match[1]]} at {match.start()}", splice(text, match, NEXT[match[1]]))
    for match in re.finditer(r"\b(min|max)(?= by)", text):
        other = "max" if match[1] == "min" else "min"
        yield from changed(f"{match[1]} -> {other} at {match.start()}", splice(text, match, other))
    for match in re.finditer(r"[{,]\s*(\w+)(=~|!~|!=|=)\"[^\"]*\"", text):
        if match[1] == "job":
            continue  # a lint holds these
        kept = "{" if match[0].startswith("{") else ""
        yield from changed(
            f"without {match[0].lstrip('{, ')} at {match.start()}",
            splice(text, match, kept).replace("{,", "{").replace("{ ,", "{"),
        )
    lists = re.compile(r"\b(by|on|group_left) ?\(([^()]*)\)")
    for label in sorted({label.strip() for match in lists.finditer(text) for label in match[2].split(",")} - {""}):

        def drop(match: re.Match[str], label: str = label) -> str:
            return f"{match[1]} ({', '.join(each for each in map(str.strip, match[2].split(',')) if each != label)})"

        yield from changed(f"no label {label} in any list", lists.sub(drop, text))
    for field in ("for", "keep_firing_for"):
        if field in rule:
            minutes = int(rule[field][:-1]) * (60 if rule[field].endswith("h") else 1)
            for factor in (0.5, 2):
                yield Mutant(name, f"{field} {rule[field]} -> {minutes * factor:g}m", field, f"{minutes * factor:.0f}m")


def write(node: Any) -> str:
    """An expression as PromQL; the parser's own text leaves the escapes in texts out."""
    return str(node).replace("\\", "\\\\")


def splice(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def shorten(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."


def dependents(rules: list[dict[str, Any]], name: str) -> set[str]:
    """The rule and all that read it, directly or not; of recordings their plain names."""
    found = {name.partition(",")[0]}
    while True:
        more = {
            name_of(rule).partition(",")[0]
            for rule in rules
            if any(
                isinstance(e, promql.VectorSelector) and e.name in found
                for e in expressions(promql.parse(rule["expr"]))
            )
        }
        if more <= found:
            return found
        found |= more


def loaded(optional: str, settings: Mapping[str, str]) -> dict[Path, str]:
    """The rules that a case loads, by file."""
    files = {Path(name): text for name, text in build_all(Alerts(), settings).items()}
    return {path: text for path, text in files.items() if path.parent == Path() or path.stem in optional.split()}


def survives(mutant: Mutant, cases: list[Case]) -> bool:
    """Whether every case that is about the rule still holds."""
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[Case]] = {}
    for case in cases:
        alike.setdefault((case.optional, tuple(case.settings.items())), []).append(case)
    for (optional, settings), same in alike.items():
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            rules = directory / "rules"
            rules.mkdir()
            for path, text in loaded(optional, dict(settings)).items():
                data = yaml.safe_load(text)
                for group in data["groups"]:
                    for rule in group["rules"]:
                        if name_of(rule) == mutant.rule:
                            rule[mutant.field] = rescale(mutant, rule, settings)
                (rules / path.name).write_text(yaml.safe_dump(data), encoding="utf-8")
            for start in range(0, len(same), CHUNK):
                holds, _ = run(same[start : start + CHUNK], directory, rules)
                if not holds:
                    return False
    return True


def rescale(mutant: Mutant, rule: Mapping[str, Any], settings: tuple[tuple[str, str], ...]) -> str:
    """The change, made to the rule as these settings have it."""
    if not settings or mutant.field != "expr":
        return mutant.text
    mine = {each.change: each.text for each in mutants_of(rule)}
    return mine.get(mutant.change, str(rule[mutant.field]))


def main(arguments: list[str]) -> int:
    wanted = arguments[0] if arguments else ""
    files = {
        path: [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
        for path, text in loaded(" ".join(case.optional for case in all_cases()), {}).items()
    }
    rules = [rule for each in files.values() for rule in each]
    optional = {name_of(rule): path.stem for path, each in files.items() if path.parent != Path() for rule in each}
    known = {
        tuple(part.strip() for part in line.split("|")[:2])
        for line in EQUAL.read_text("utf-8").splitlines()
        if "|" in line
    }
    every = [mutant for rule in rules if wanted in name_of(rule) for mutant in mutants_of(rule)]
    cases = all_cases()
    began = time.monotonic()

    def judge(mutant: Mutant) -> tuple[Mutant, bool]:
        mine = dependents(rules, mutant.rule)
        about = [
            case
            for case in cases
            if mine & ({each.alert for each in case.firing} | set(case.about))
            and optional.get(mutant.rule, "") in ("", *case.optional.split())
        ]
        about.sort(key=lambda case: (mutant.rule not in {each.alert for each in case.firing}, case.world.minutes))
        return mutant, survives(mutant, about)

    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, lives in pool.map(judge, every):
            if lives and (mutant.rule, mutant.change) not in known:
                survivors += 1
                print(f"{mutant.rule} | {mutant.change}", flush=True)
    print(f"{len(every)} changes, {survivors} not noticed, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
