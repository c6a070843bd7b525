"""Finds wording that readers have to read twice: `python -m tools.words [PATH ...]`.

The rules and their plain forms are in CONTRIBUTING.md, "Plain English". Searches prose (Markdown, YAML comments and
texts), docstrings, comments and texts of Python, and the names of tests. Skips generated texts, but searches their
sources. A match of WRONG cannot be correct English, and fails a test. A match of ODD may be right; the test prints it.
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

FOLDERS = ("exporter/gpu_exporter", "exporter/hook", "docs", "alerts", "grafana", "helm", "tests", "tools", ".")
SUFFIXES = {".py", ".md", ".yaml", ".tpl", ".sh"}
LEFT_OUT = ("tests/fixtures/", "tests/unit/test_words.py", "tools/words.py")  # text of others; lists of the very words
GENERATED = re.compile(r"\b(Generated|Made) from .* by (tools/|`make generate`)")  # in the first lines of a file
GENERATED_PART = re.compile(r"<!-- (?:generated: \w+|packages) -->.*?<!-- (?:end|/packages) -->", re.DOTALL)
HEAD = 200  # characters

AMOUNT = r"(?:\d+|two|three|four|five|six|eight|ten|twelve|fifteen|twenty|thirty) ?"
TIMES = r"(?:ms|s|min|h|seconds|minutes|hours|days|weeks)\b"
END = r"(?=[.,;:)\"'{]|$)"


class Rule(NamedTuple):
    """A kind of finding. A text without any of `words` is not searched for the pattern."""

    words: tuple[str, ...]
    pattern: str


WRONG = {
    "each 5 s: every 5 s": Rule(
        ("each ",), rf"(?<![,;:(] )\beach {AMOUNT}{TIMES}(?! (?:long|old|apart|after|before|in|later|of)\b)"
    ),
    "since 5 s: for 5 s": Rule(("since ",), rf"\bsince {AMOUNT}{TIMES}(?! (?:ago|before|after|earlier|later)\b)"),
    "a word twice": Rule(
        ("the the", "a a", "an an", "of of", "to to", "and and", "with with"),
        r"(?<![.,-])\b(the|an?|of|to|and|with) \1\b(?![.,-])",
    ),
    "a noun that has no plural": Rule(
        ("informations", "wares", "feedbacks", "advices"), r"\b(?:informations|softwares|hardwares|feedbacks|advices)\b"
    ),
}
ODD = {
    "allows to do it: allows doing it, lets PROGRAM do it": Rule(
        (" to ",), r"\ballow(?:s|ing)? to (?!be\b|ranks\b)[a-z{]"
    ),
    "nobody, somebody, whoever: name the actor": Rule(
        ("nobody", "somebody", "whoever"), r"\b(?:nobody|somebody|whoever)\b"
    ),
    "anew: again, new": Rule(("anew",), r"\banew\b"),
    "is none: say what is missing or invalid": Rule(("none",), r"\b(?:is|are|was|be) (?-i:none)\b(?! of)"),
    "is one: repeat the noun": Rule((" one",), rf"\b(?:is|was|be) one{END}"),
    "of ours: our, or the exporter's": Rule(("of ours",), r"\bof ours\b"),
    "is said, says so: name what reports it": Rule(("said", "so"), r"\b(?:is|are|be) said\b|\bsays? so\b"),
    "stand: remain": Rule(
        ("stand", "stood"), r"\b(?:stands?|stood) (?!in\b|beside\b|for\b|alone\b|still\b|out\b|up\b)"
    ),
    "in peace: unchanged, not asked": Rule(("peace",), r"\bin peace\b"),
    "so long, so many: give the length, the number": Rule(("so ",), rf"\b(?:so long|so many|so often){END}"),
}
RULES = {**WRONG, **ODD}
COMPILED = {rule: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for rule, (_, pattern) in RULES.items()}

# Findings that are right where they are: by path, the lines, and why.
EXCEPTIONS = {
    "CONTRIBUTING.md": (r"^\| .* \| .* \| .* \|$", "the table of rules quotes what to avoid"),
    "tests/gpu_check.py": (r".*[\"']nobody[\"'].*", "the Unix user"),
    "tests/testbed/slurm.py": (r".*nobody.*", "the Unix user"),
    "tests/unit/attribution/test_slurm_words.py": (r".*nobody.*", "the Unix user"),
}


class Finding(NamedTuple):
    """A place at which a rule is broken."""

    line: int
    rule: str
    text: str


def find(path: Path) -> list[Finding]:
    """Returns the findings in one file, in order."""
    source = path.read_text("utf-8")
    plain = source.replace("_", " ")
    lower = plain.lower()
    # Few files have any of these words, and breaking a file of Python into its texts is slow.
    likely = [
        rule
        for rule, (words, _) in RULES.items()
        if any(word in lower for word in words) and COMPILED[rule].search(plain)
    ]
    if not likely or GENERATED.search(source[:HEAD]):
        return []
    if path.suffix == ".md":
        source = GENERATED_PART.sub(lambda part: "\n" * part.group(0).count("\n"), source)
    texts = _python_texts(source) if path.suffix == ".py" else enumerate(source.splitlines(), 1)
    excepted, _ = EXCEPTIONS.get(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "", ("$.", ""))
    return [
        Finding(number, rule, match.group(0))
        for number, text in texts
        for rule in likely
        for match in COMPILED[rule].finditer(text)
        if not re.fullmatch(excepted, text)
    ]


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and text of comments, strings and names of tests. In names, spaces replace underscores."""
    names = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in names:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line
        elif token.type == tokenize.NAME and token.string.startswith("test_"):
            yield token.start[0], token.string.replace("_", " ")


def list_files() -> list[Path]:
    """Returns every file with text that people read."""
    found: set[Path] = set()
    for folder in FOLDERS:
        paths = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        found |= {path for path in paths if path.suffix in SUFFIXES and path.is_file()}
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT))


def main(given: Sequence[str]) -> int:
    wanted = [Path(path).resolve() for path in given]
    paths = [path for path in list_files() if not wanted or any(path.is_relative_to(each) for each in wanted)]
    found = [(path.relative_to(ROOT), *finding) for path in paths for finding in find(path)]
    for path, line, rule, text in found:
        print(f"{path}:{line}: {text!r}: {rule}")
    return int(any(rule in WRONG for _, _, rule, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
