"""Generates parts of docs/causes.md and docs/owners.md: the list of causes, and the share of correct findings."""

from __future__ import annotations

import re
import sys

from tests.workloads import score

from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.diagnosis.causes.rules import RULES

PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render_causes(page: str) -> str:
    """Returns the page with its generated parts. Raises KeyError for an unknown part."""
    parts = {"table": _table, "causes": _causes, "score": _score, "hook": _hook, "owner": _owner}
    return PART.sub(lambda match: f"{match[1]}{parts[match[2]]()}{match[3]}", page)


def _table() -> str:
    lines = ["| cause | in words |", "| --- | --- |"]
    lines += [f"| [{name}](#{name}) | {CAUSES[name].title} |" for name in RULES]
    return "\n".join(lines) + "\n"


def _owner() -> str:
    lines = ["| cause | in words | what to change |", "| --- | --- | --- |"]
    lines += [
        f"| [{name}](causes.md#{name}) | {each.title} | {each.owner} |" for name, each in CAUSES.items() if each.owner
    ]
    return "\n".join(lines) + "\n"


def _causes() -> str:
    sections = []
    for name, rule in RULES.items():
        about_it = sys.modules[rule.judge.__module__].__doc__ or ""
        lines = [f"### {name}", "", about_it.strip().replace("\n", " "), ""]
        meaning = CAUSES[name]
        quantities = ", ".join(f"`{each}`" for each in meaning.quantities)
        about = {"Evidence": rule.needs, "Against it": rule.against, "Numbers": quantities}
        about |= {"Owner": meaning.owner, "Site": meaning.site}
        lines += [f"- {what}: {text}." for what, text in about.items() if text]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _score() -> str:
    records = score.read_records()
    named = [score.replay(record) for record in records]
    nameless = [score.replay(record, score.strip_names) for record in records]
    faulty = sum(bool(each.truth) for each in named)
    lines = [
        f"{len(named)} jobs: {faulty} with a fault or a pair of faults, {len(named) - faulty} without.",
        "",
        "| | as recorded | without process names |",
        "| --- | --- | --- |",
        f"| precision of the cause named first (95 % interval) | {_precision(named)} | {_precision(nameless)} |",
        f"| recall of the faults (95 % interval) | {_recall(named)} | {_recall(nameless)} |",
        f"| easy healthy jobs without a cause | {_quiet(named, hard=False)} | {_quiet(nameless, hard=False)} |",
        f"| hard healthy jobs without a cause | {_quiet(named, hard=True)} | {_quiet(nameless, hard=True)} |",
        f"| expected precision if 30 % of jobs are faulty | {_expected(named, 0.3)} | {_expected(nameless, 0.3)} |",
        f"| ... if 10 % are | {_expected(named, 0.1)} | {_expected(nameless, 0.1)} |",
        "",
        "The misses:",
        "",
        "| job | its faults | state | causes found (low confidence in brackets) |",
        "| --- | --- | --- | --- |",
    ]
    lines += [_line(each) for each in named if not _is_right(each)]
    return "\n".join(lines) + "\n"


def _hook() -> str:
    """Compares the same runs with and without the hook's reports."""
    records = score.read_records(score.HOOK_RECORDS)
    pairs = [(score.replay(record), score.replay(record, with_hook=True)) for record in records]
    without, with_hook = [before for before, _ in pairs], [after for _, after in pairs]
    hard, easy = (score.specificity(without, hard=is_hard)[1] for is_hard in (True, False))
    faulty = len(pairs) - hard - easy
    lines = [
        f"{len(pairs)} jobs: {faulty} with a fault, {hard} healthy and hard, {easy} healthy and easy.",
        "",
        "| | without the hook | with the hook |",
        "| --- | --- | --- |",
        f"| precision of the cause named first (95 % interval) | {_precision(without)} | {_precision(with_hook)} |",
        f"| recall of the faults (95 % interval) | {_recall(without)} | {_recall(with_hook)} |",
        f"| hard healthy jobs without a cause | {_quiet(without, hard=True)} | {_quiet(with_hook, hard=True)} |",
    ]
    return "\n".join(lines) + "\n"


def _is_right(each: score.Scored) -> bool:
    return each.truth <= set(each.found) and set(each.found[:1]) <= each.truth


def _line(each: score.Scored) -> str:
    return f"| {' | '.join((_name(each), _kind(each), each.state, _list_found(each)))} |"


def _name(each: score.Scored) -> str:
    return each.script.replace("_", " ")


def _kind(each: score.Scored) -> str:
    return ("healthy, hard" if each.hard else "healthy") if not each.truth else ", ".join(sorted(each.truth))


def _list_found(each: score.Scored) -> str:
    found = [cause.name if cause.name in each.found else f"({cause.name})" for cause in each.causes.ranked]
    return ", ".join(found) or "none"


def _precision(scored: list[score.Scored]) -> str:
    return _with_interval(score.score(scored).precision, score.interval(scored, lambda each: each.precision))


def _recall(scored: list[score.Scored]) -> str:
    return _with_interval(score.score(scored).recall, score.interval(scored, lambda each: each.recall))


def _with_interval(value: float | None, bounds: tuple[float, float]) -> str:
    return "-" if value is None else f"{value:.2f} ({bounds[0]:.2f} to {bounds[1]:.2f})"


def _quiet(scored: list[score.Scored], *, hard: bool) -> str:
    quiet, whole = score.specificity(scored, hard=hard)
    return f"{quiet} of {whole}"


def _expected(scored: list[score.Scored], faulty: float) -> str:
    return f"{score.expected_precision(scored, faulty):.2f}"
