"""Changes every threshold, guard, window, matcher and label list of the rules, one at a time, and lists changes that no case detects.

    python -m tests.rules.mutants [PARTS OF FILE/RULE, BETWEEN COMMAS]

equal.txt lists changes that cannot be detected: `rule | change | reason`, the first two as regular expressions. Exit status 1 if
any other change is not detected. A run takes an hour or two on two cores, so it is not part of CI.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml
from tools.rules import build_all

from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.durations import DURATION, parse_duration
from tests.rules.cases import all_cases
from tests.rules.crowd import ask
from tests.rules.promtool import Case, Dumper, merge, run
from tests.rules.world import World
from tests.unit.test_rules import ALERTS as ALL_ALERTS
from tests.unit.test_rules import expressions, name_of

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
EQUAL = Path(__file__).with_name("equal.txt")
CHUNK = 6
ALERTS = ask("ALERTS")
NAMES_OF_ALERTS = {rule["alert"] for rule in ALL_ALERTS}
NEXT = {">": "<", "<": ">", ">=": "<", "==": "!=", "!=": "=="}


class Mutant(NamedTuple):
    rule: str
    change: str
    field: str
    text: str
    place: tuple[str, int] = ("", 0)
    """The kind of the change, and its position among changes of this kind: the same for all parameters of the rule."""


def mutants_of(rule: Mapping[str, Any]) -> Iterator[Mutant]:
    """Every changed form of one rule."""
    name = name_of(rule)
    tree = promql.parse(rule["expr"])
    text = write(tree)
    seen = {text}

    counted: Counter[str] = Counter()

    def changed(kind: str, change: str, mutant: str) -> Iterator[Mutant]:
        promql.parse(mutant)  # raises ValueError, because invalid PromQL would count as detected
        counted[kind] += 1
        if mutant not in seen:
            seen.add(mutant)
            yield Mutant(name, change, "expr", mutant, (kind, counted[kind]))

    for node in expressions(tree):
        if isinstance(node, promql.BinaryExpr):
            here, op = write(node), str(node.op)
            if op in ("and", "unless"):
                left = text.replace(here, f"({write(node.lhs)})", 1)
                yield from changed(op, f"without `{op} {shorten(str(node.rhs))}`", left)
            if op == "or":
                left, right = (text.replace(here, f"({write(side)})", 1) for side in (node.lhs, node.rhs))
                yield from changed("only left", f"without `or {shorten(str(node.rhs))}`", left)
                yield from changed("only right", f"without `{shorten(str(node.lhs))} or`", right)
    quoted = [range(*match.span()) for match in re.finditer(r'"[^"]*"', text)]
    for match in re.finditer(r"(?<![\w$.])(\d+(?:\.\d+)?)(?![\w.])", text):
        if any(match.start() in each for each in quoted):
            continue
        number = float(match[1])
        # Most values that are compared with 0 are whole numbers.
        for kind, value in zip(("less", "more"), (number * 0.5, number * 2.0) if number else (-1.0, 1.0), strict=True):
            change = f"{match[1]} -> {value:g} at {match.start()}"
            yield from changed(kind, change, splice(text, match, f"{value:.10g}"))
    for match in re.finditer(rf"\[((?:{DURATION.pattern})+)\]", text):
        seconds = parse_duration(match[1])
        for factor in (0.5, 2.0):
            change = f"{match[0]} -> {seconds * factor:g}s at {match.start()}"
            yield from changed(f"window {factor}", change, splice(text, match, f"[{seconds * factor:.0f}s]"))
    for match in re.finditer(r"(?<=[\s)])(>=|==|!=|>|<)(?=\s)", text):
        new = NEXT[match[1]]
        yield from changed("comparison", f"{match[1]} -> {new} at {match.start()}", splice(text, match, new))
    for match in re.finditer(r"\b(min|max)(?= by)", text):
        other = "max" if match[1] == "min" else "min"
        yield from changed("max", f"{match[1]} -> {other} at {match.start()}", splice(text, match, other))
    for match in re.finditer(r"[{,]\s*(\w+)(=~|!~|!=|=)\"[^\"]*\"", text):
        if match[1] == "job":
            continue  # test_rules.py checks these
        kept = "{" if match[0].startswith("{") else ""
        without = splice(text, match, kept).replace("{,", "{").replace("{ ,", "{")
        yield from changed(match[1], f"without {match[0].lstrip('{, ')} at {match.start()}", without)
    lists = re.compile(r"\b(by|on|group_left) ?\(([^()]*)\)")
    for label in sorted({label.strip() for match in lists.finditer(text) for label in match[2].split(",")} - {""}):

        def drop(match: re.Match[str], label: str = label) -> str:
            return f"{match[1]} ({', '.join(each for each in map(str.strip, match[2].split(',')) if each != label)})"

        yield from changed(f"label {label}", f"no label {label} in any list", lists.sub(drop, text))
    for field in ("for", "keep_firing_for"):
        if field in rule:
            minutes = int(rule[field][:-1]) * (60 if rule[field].endswith("h") else 1)
            for factor in (0.5, 2):
                yield Mutant(name, f"{field} {rule[field]} -> {minutes * factor:g}m", field, f"{minutes * factor:.0f}m")


def write(node: Any) -> str:
    """An expression as PromQL. The parser's own text lacks the escapes in strings."""
    return str(node).replace("\\", "\\\\")


def splice(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def shorten(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."


def names_in(expr: str) -> set[str]:
    """Names of the series that an expression reads."""
    return {str(e.name) for e in expressions(promql.parse(expr)) if isinstance(e, promql.VectorSelector)}


def closure(edges: Mapping[str, set[str]], name: str) -> set[str]:
    """The name and all names that can be reached from it."""
    found, open_ = {name}, [name]
    while open_:
        more = edges.get(open_.pop(), set()) - found
        found |= more
        open_ += more
    return found


class Rules:
    """The rules with some parameters and optional files, in promtool's form, and which rule reads which recording.

    Recordings have their plain name here, because a rule reads a recording from every exporter.
    """

    def __init__(self, optional: str, settings: Mapping[str, str]) -> None:
        self.settings = settings
        files = {Path(name): text for name, text in build_all(Alerts(), settings).items()}
        self.files = {
            path: yaml.load(text, Loader=Loader)
            for path, text in files.items()
            if path.parent == Path() or path.stem in optional.split()
        }
        self.read_by: dict[str, set[str]] = {}
        self.read: dict[str, set[str]] = {}
        for _, rule in self.each():
            name = plain(name_of(rule))
            for other in names_in(rule["expr"]):
                self.read_by.setdefault(other, set()).add(name)
                self.read.setdefault(name, set()).add(other)

    def each(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path, data in self.files.items():
            for group in data["groups"]:
                for rule in group["rules"]:
                    yield path, rule

    def changed_by(self, mutant: Mutant) -> set[str]:
        """The rules that this change can affect."""
        return closure(self.read_by, plain(mutant.rule))

    def write(self, mutant: Mutant, wanted: set[str], directory: Path) -> None:
        """Write the wanted rules, with the change in one of them."""
        for path, data in self.files.items():
            groups = []
            for group in data["groups"]:
                rules = [
                    {**rule, mutant.field: rescale(mutant, rule) if self.settings else mutant.text}
                    if name_of(rule) == mutant.rule
                    else rule
                    for rule in group["rules"]
                    if plain(name_of(rule)) in wanted
                ]
                groups += [{**group, "rules": rules}] if rules else []
            if groups:
                (directory / path.name).write_text(yaml.dump({"groups": groups}, Dumper=Dumper), encoding="utf-8")


def plain(name: str) -> str:
    return name.partition(",")[0]


def rescale(mutant: Mutant, rule: Mapping[str, Any]) -> str:
    """The same change in the rule with other settings."""
    if mutant.field != "expr":
        return mutant.text
    same = (each.text for each in mutants_of(rule) if each.place == mutant.place)
    return next(same, str(rule[mutant.field]))


@cache
def cases() -> list[Case]:
    return all_cases()


@cache
def rules_of(optional: str, settings: tuple[tuple[str, str], ...]) -> Rules:
    return Rules(optional, dict(settings))


def survives(mutant: Mutant) -> bool:
    """Whether every case about the rule still holds. Only rules that the change can affect are evaluated."""
    if not mutant.rule.startswith("Gpu"):
        # First the recording of the rule itself in a crowd: this needs few rules and detects most changes.
        for rules, same in alike(mutant):
            if not holds(mutant, rules, [case for case in same if case.is_golden], {plain(mutant.rule)}):
                return False
    for rules, same in alike(mutant):
        reached = rules.changed_by(mutant)
        if not holds(mutant, rules, [case for case in same if reached & subjects(case)], reached):
            return False
    return True


def alike(mutant: Mutant) -> Iterator[tuple[Rules, list[Case]]]:
    """Cases by the rules that they load, if the changed rule is among them."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Case]] = {}
    for case in cases():
        found.setdefault((case.optional, tuple(case.settings.items())), []).append(case)
    for (optional, settings), same in sorted(found.items(), key=lambda item: (item[0][0], len(item[0][1]))):
        rules = rules_of(optional, settings)
        if any(name_of(rule) == mutant.rule for _, rule in rules.each()):
            yield rules, same


def holds(mutant: Mutant, rules: Rules, about: list[Case], reached: set[str]) -> bool:
    """Whether the cases hold with the changed rule, the rules of `reached`, and everything that these read."""
    wanted = {each for name in reached for each in closure(rules.read, name)}
    merged = merge([narrow(case, reached, wanted) for case in about])
    merged.sort(key=lambda case: (plain(mutant.rule) not in subjects(case), len(case.world.series)))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "rules").mkdir()
        rules.write(mutant, wanted, directory / "rules")
        for start in range(0, len(merged), CHUNK):
            if not run(merged[start : start + CHUNK], directory, directory / "rules")[0]:
                return False
    return True


def subjects(case: Case) -> set[str]:
    """Alerts and recordings that a case asks for."""
    asked = {name for _, expr, _ in case.values for name in names_in(expr)}
    alerts = NAMES_OF_ALERTS if case.is_golden else {each.alert for each in case.firing}
    return alerts | {plain(each) for each in case.about} | asked


def narrow(case: Case, mine: set[str], wanted: set[str]) -> Case:
    """The part of a case that a change of `mine` can affect, if only `wanted` can be read."""

    def asked(expr: str) -> bool:
        if expr == ALERTS:
            return bool(mine & NAMES_OF_ALERTS)
        read = {name for name in names_in(expr) if ":" in name or name.startswith("DCGM_")}
        return bool(read & mine) and read <= wanted

    world = World(case.world.minutes)
    world.away = case.world.away
    world.series = {name: row for name, row in case.world.series.items() if name.partition("{")[0] in wanted}
    return replace(
        case,
        world=world,
        firing=[each for each in case.firing if each.alert in mine],
        values=[only(mine, *each) if each[1] == ALERTS else each for each in case.values if asked(each[1])],
    )


def only(
    mine: set[str], at: int, _: str, rows: Sequence[tuple[str, float]]
) -> tuple[int, str, list[tuple[str, float]]]:
    """Only the alerts in `mine`."""
    kept = [row for row in rows if set(re.findall(r'alertname="(\w+)"', row[0])) & mine]
    return at, ask(f'ALERTS{{alertname=~"{"|".join(sorted(mine & NAMES_OF_ALERTS))}"}}'), kept


def main(arguments: list[str]) -> int:
    wanted = arguments[0].split(",") if arguments else [""]
    every = list(Rules(" ".join(case.optional for case in cases()), {}).each())
    known = [
        tuple(re.compile(part.strip()) for part in line.split(" | ")[:2])
        for line in EQUAL.read_text("utf-8").splitlines()
        if " | " in line and not line.startswith("#")
    ]

    def is_known(mutant: Mutant, pair: tuple[re.Pattern[str], ...]) -> bool:
        return bool(pair[0].fullmatch(mutant.rule) and pair[1].fullmatch(mutant.change))

    mutants: list[Mutant] = []
    for rule in (rule for path, rule in every if any(part in f"{path.stem}/{name_of(rule)}" for part in wanted)):
        mutants += mutants_of(rule)
    stale = [pair for pair in known if wanted == [""] and not any(is_known(each, pair) for each in mutants)]
    for rule_name, change in stale:
        print(f"{EQUAL.name}: {rule_name.pattern} | {change.pattern}: this change does not exist")
    mutants = [each for each in mutants if not any(is_known(each, pair) for pair in known)]
    began = time.monotonic()
    survivors = 0
    with ProcessPoolExecutor(2) as pool:
        for mutant, lives in zip(mutants, pool.map(survives, mutants, chunksize=4), strict=True):
            if lives:
                survivors += 1
                print(f"{mutant.rule} | {mutant.change}", flush=True)
    print(f"{len(mutants)} changes, {survivors} not detected, {time.monotonic() - began:.0f} s")
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
