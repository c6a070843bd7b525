"""Finds wording that readers have to read twice: `python -m tools.words [PATH ...]`.

The rules and their plain forms are in CONTRIBUTING.md, "Plain English". Looks at prose (Markdown, YAML comments and
texts), at docstrings, comments and texts of Python, and at the names of tests. BASELINE says how many findings a file
may still have: a number can only go down, so that new text is plain and old text becomes plain.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.files import ROOT

BASELINE = ROOT / "tools" / "words.txt"
FOLDERS = ("exporter/gpu_exporter", "exporter/hook", "docs", "alerts", "grafana", "helm", "tests", "tools", ".")
SUFFIXES = {".py", ".md", ".yaml", ".tpl", ".sh"}
# Made from other files, which are looked at; or a list of the very words.
LEFT_OUT = (
    "CHANGELOG.md",
    "alerts/rules/",
    "docs/commands.md",
    "docs/metrics.md",
    "exporter/gpu_exporter/common/config/defaults.py",
    "grafana/provisioning/",
    "helm/gpu-exporter/rules/",
    "tests/fixtures/",
    "tests/golden/",
    "tools/words.py",
)
WORDS = {
    "nobody, somebody, whoever: name the actor": r"\b(nobody|somebody|whoever)\b",
    "anew: again, new": r"\banew\b",
    "is none: say what is missing or invalid": r"\b(is|are|was|be) (?-i:none)\b(?! of)",
    "is one: repeat the noun": r"\b(is|was|be) one(?=[.,;:)]|$)",
    "of ours: our, or the exporter's": r"\bof ours\b",
    "is said, says so: name what reports it": r"\b(is|are|be) said\b|\bsays? so\b",
    "stand: remain": r"\b(stands?|stood) (?!in\b|beside\b|for\b|alone\b)",
    "each N: every N": r"\beach (\d+|second|minute|hour|day|two|five|ten|fifteen|thirty)\b",
    "in peace: unchanged, not asked": r"\bin peace\b",
    "so long, so many: give the length, the number": r"\b(so long|so many|so often)(?=[.,;:)]|$)",
}

# Findings that are right where they are: by path, the lines, and why.
EXCEPTIONS = {
    "CONTRIBUTING.md": (r"^\| .* \| .* \| .* \|$", "the table of rules quotes what to avoid"),
    "tests/gpu_check.py": (r".*[\"']nobody[\"'].*", "the Unix user"),
    "tests/testbed/slurm.py": (r".*nobody.*", "the Unix user"),
    "tests/unit/attribution/test_slurm_words.py": (r".*nobody.*", "the Unix user"),
    "tests/unit/test_words.py": (r".*", "the test quotes what to avoid"),
}


class Finding(NamedTuple):
    """Where a rule is broken."""

    line: int
    rule: str
    text: str


def find(path: Path) -> list[Finding]:
    """The findings of one file, in order."""
    source = path.read_text("utf-8")
    texts = _python_texts(source) if path.suffix == ".py" else enumerate(source.splitlines(), 1)
    excepted, _ = EXCEPTIONS.get(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "", ("$.", ""))
    return [
        Finding(number, rule, match.group(0))
        for number, text in texts
        for rule, pattern in WORDS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
        if not re.fullmatch(excepted, text)
    ]


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, texts, and the names of tests with spaces in place of underscores."""
    names = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in names:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
        elif token.type == tokenize.NAME and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")


def list_files() -> list[Path]:
    """Every file with text that people read."""
    found: set[Path] = set()
    for folder in FOLDERS:
        paths = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        found |= {path for path in paths if path.suffix in SUFFIXES and path.is_file()}
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT))


def read_baseline() -> dict[str, int]:
    """By path, how many findings it may have."""
    lines = BASELINE.read_text("utf-8").splitlines()
    return {path: int(count) for count, path in (line.split() for line in lines if not line.startswith("#"))}


def main(given: Sequence[str]) -> int:
    if given == ["--update"]:
        counts = {path.relative_to(ROOT).as_posix(): len(find(path)) for path in list_files()}
        rows = "".join(f"{count:3} {path}\n" for path, count in sorted(counts.items()) if count)
        BASELINE.write_text(
            f"# Findings that a file may still have (tools/words.py). Numbers only go down.\n{rows}", "utf-8"
        )
        return 0
    wanted = [Path(path).resolve() for path in given]
    paths = [path for path in list_files() if not wanted or any(path.is_relative_to(each) for each in wanted)]
    for path in paths:
        for line, rule, text in find(path):
            print(f"{path.relative_to(ROOT)}:{line}: {text!r}: {rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
