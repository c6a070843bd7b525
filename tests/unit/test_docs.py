"""Names in docs, docstrings and help texts exist: links, anchors, files, commands, flags, variables, metrics, settings."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.testbed.written import code_blocks, commands
from tools.questions import QUESTIONS, is_read

from gpu_exporter.agent.collectors.registry import ALL
from gpu_exporter.agent.exposition.catalog import fixed_groups
from gpu_exporter.cli.commands import COMMANDS, SERVE
from gpu_exporter.cli.parser import Parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "exporter" / "gpu_exporter"
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "alerts").rglob("*.md"),
    *(ROOT / "helm").rglob("*.md"),
    *(ROOT / "exporter" / "hook").rglob("*.md"),
]
HOOK = ROOT / "exporter" / "hook"
MODULES = [*PACKAGE.rglob("*.py"), *HOOK.rglob("*.py"), *(ROOT / "tools").glob("*.py")]
SEARCHED = (
    ROOT,
    *(path for path in PACKAGE.iterdir() if path.is_dir()),
    PACKAGE,
    ROOT / "docs",
    ROOT / "alerts",
    ROOT / "tests",
)
# Flags of other programs, and names that tell what was before.
FOREIGN_FILES = {
    "config.toml",  # containerd's
    "doc/PROTOCOL-HTTP2.md",  # of gRPC
    "docs/web-configuration.md",  # of exporter-toolkit
    "gpu_exporter/common/config/defaults.py",  # as a place in the package
    "sitecustomize.py",
}
FOREIGN_NAMES = {  # fields, and no metrics
    "gpu_slices",
    "gpu_instance",
    *("gpu_wait_seconds", "gpu_work_seconds", "gpu_seconds"),  # of a training's report
    "gpu_exporter_torch",  # a package
}
STATE_FILES = {"identity.key"}
FOREIGN_FLAGS = {
    "--all", "--check", "--create-namespace", "--clusters", "--comment", "--compressed", "--dry-run", "--file", "--find-links", "--flaml", "--gres",
    "--help", "--json", "--local", "--namespace", "--no-hooks", "--no-index", "--output", "--output-dir", "--overwrite", "--reuse-values", "--set", "--show-labels", "--set-file",
    "--strict", "--update-golden", "--values", "--version", "--web.config.file", "--wait",
}  # fmt: skip


@cache
def pages() -> list[tuple[str, str]]:
    """Every text that names things, by where it is."""
    return [*_texts()]


def _texts() -> Iterator[tuple[str, str]]:
    for path in PAGES:
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text:
                    yield f"{path.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 1)}", text


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = next(n for n in range(100) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@cache
def parsers() -> dict[str, Parser]:
    return {name: command.load().build_parser() for name, command in {"": SERVE, **COMMANDS}.items()}


@cache
def known_flags() -> frozenset[str]:
    return frozenset(
        flag for parser in parsers().values() for action in parser._actions for flag in action.option_strings
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file.read_text("utf-8"))):
            wrong.append(target)
    assert wrong == []


def test_files_that_are_named_exist() -> None:
    names = {
        path.name
        for folder in (PACKAGE, HOOK, ROOT / "tests", ROOT / "tools", ROOT / "alerts", ROOT / "grafana")
        for path in folder.rglob("*.py")
    }
    wrong = []
    for where, text in pages():
        for name in re.findall(r"(?<![\w/.$-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|toml))(?![\w/])", text):
            here = (ROOT / where.partition(":")[0]).parent
            if "/" in name:
                is_there = any((folder / name).exists() for folder in (*SEARCHED, here))
            else:
                is_there = name in names or any((folder / name).exists() for folder in (*SEARCHED, here))
            if not is_there and name not in FOREIGN_FILES:
                wrong.append(f"{where}: {name}")
    assert wrong == []


def test_commands_that_are_named_exist() -> None:
    wrong = [
        f"{where}: gpu-exporter {name}"
        for where, text in pages()
        for name in re.findall(r"`(?:kubectl exec [^`]*-- )?gpu-exporter ([a-z][a-z-]+)", text)
        if name not in {*COMMANDS, "help", "version"}
    ]
    assert wrong == []


def test_flags_that_are_named_exist() -> None:
    wrong = [
        f"{where}: {flag}"
        for where, text in pages()
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", text)
        if flag not in known_flags() | FOREIGN_FLAGS
        and f"--{flag.removeprefix('--no-')}" not in known_flags()
        and ("." in flag or re.search(rf"gpu-exporter[^\n`]*{re.escape(flag)}\b", text))
        and not any(known.startswith(flag + ".") for known in known_flags())
    ]
    assert wrong == []


def test_commands_in_code_blocks_are_accepted() -> None:
    """Each flag and its value, by the parser that the user meets."""
    wrong, seen = [], 0
    for path in PAGES:
        for block in code_blocks(path):
            for arguments in commands(block, "gpu-exporter"):
                name, rest = (
                    (arguments[0], arguments[1:]) if arguments and arguments[0] in COMMANDS else ("", arguments)
                )
                seen += 1
                try:
                    parsers()[name].parse_args(rest)
                except SystemExit as exc:
                    wrong.append(f"{path.relative_to(ROOT)}: gpu-exporter {' '.join(arguments)}: {exc}")
    assert wrong == []
    assert seen > 10


def test_extras_that_are_named_exist() -> None:
    extras = importlib.metadata.metadata("gpu-exporter").get_all("Provides-Extra") or []
    named = {name for _, text in pages() for name in re.findall(r"pip install '\.\[([\w,-]+)\]'", text)}
    assert named and named <= set(extras)


def test_variables_that_are_named_exist() -> None:
    own = {variable for parser in parsers().values() for variable in (*parser.settings, *parser.verbs)}
    scripts = {"GPU_EXPORTER_DRAIN", "GPU_EXPORTER_JOB_FILES", "GPU_EXPORTER_TRAINING_FILES", "GPU_EXPORTER_TRAINING_DIR", "GPU_EXPORTER_COLLECTOR_FLAGS", "GPU_EXPORTER_DIGEST_FLAGS", "GPU_EXPORTER_JOB_FLAGS", "GPU_EXPORTER_PORT",
               "GPU_EXPORTER_SERVICE_HOST", "GPU_EXPORTER_RECONCILE", "GPU_EXPORTER_SLURM_COLLECTOR", "GPU_EXPORTER_RESTARTED", "GPU_EXPORTER_APPLY"}  # fmt: skip
    wrong = [
        f"{where}: {name}"
        for where, text in pages()
        for name in re.findall(r"GPU_EXPORTER_[A-Z_]*[A-Z]", text)
        if name not in own | scripts
    ]
    assert wrong == []


def test_settings_that_are_named_exist() -> None:
    defaults = yaml.safe_load((PACKAGE / "common" / "config" / "defaults.yaml").read_text("utf-8"))
    wrong = [
        f"{where}: {section}.{key}"
        for where, text in pages()
        for section, key in re.findall(rf"`(?:settings\.)?({'|'.join(defaults)})\.([a-z_]+)\b(?!\()", text)
        if key not in defaults[section]
        and f"{section}.{key}" not in STATE_FILES
        and key not in ("py", "md", "yaml", "json", "sh")
    ]
    assert wrong == []


@cache
def known_metrics() -> frozenset[str]:
    """Names in the reference, in the rules, and of the reconciler and collector."""
    text = "".join(
        path.read_text("utf-8")
        for path in (
            ROOT / "docs" / "metrics.md",
            ROOT / "tests" / "golden" / "names.txt",
            *(ROOT / "alerts" / "rules").rglob("*.yaml"),
            *(PACKAGE / "reconciler").rglob("*.py"),
            *(PACKAGE / "agent" / "slurm_collector").rglob("*.py"),
            *(PACKAGE / "agent" / "exposition").rglob("*.py"),
        )
    )
    found = re.findall(r"\bgpu_[a-z0-9_]+\b", text)
    return frozenset(found) | {
        f"{name}_total" for name in found if name.startswith("gpu_reconciler_")
    }  # as Counter does


def test_metrics_that_are_named_exist() -> None:
    known = known_metrics() | FOREIGN_NAMES | {name.removesuffix("_total") for name in known_metrics()}
    wrong = [
        f"{where}: {name}"
        for where, text in pages()
        for name in re.findall(r"`(gpu_(?!exporter\b)[a-z0-9_]+)(?![\w.*/])", text)
        if name not in known and not name.endswith("_") and not any(each.startswith(f"{name}_") for each in known)
    ]
    assert wrong == []


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](page.md#one-two) [b](page.md#three) [c](nowhere.md)\n", "utf-8")
    assert anchors_of(page.read_text("utf-8")) == {"one-two"}
    assert "--attribution.slurm.nod" not in known_flags()
    assert "--attribution.slurm.node" in known_flags()
    assert "gpu_busy_seconds_total" in known_metrics()
    assert "gpu_busier_seconds_total" not in known_metrics()


def test_every_metric_is_read_by_something_here_or_answers_a_question_that_the_reference_names() -> None:
    families = [family.name for collector in ALL for family in (*collector.families, *collector.instance_families)]
    families += [family.name for _, _, group in fixed_groups() for family in group]
    assert {name for name in families if not is_read(name)} == QUESTIONS.keys()


def test_every_decision_is_in_the_index_and_those_that_were_changed_say_by_which() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| \d{4}-\d\d-\d\d \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", index, re.M)
    pages = sorted(path for path in folder.glob("0*.md"))
    assert [(f"{int(number):04}", name) for number, name, _, _ in rows] == [
        (path.name[:4], path.name) for path in pages
    ]
    for path, (_, _, title, status) in zip(pages, rows, strict=True):
        text = path.read_text("utf-8")
        assert text.splitlines()[0] == f"# {title}"
        changed = re.search(r"^\*\*Changed\*\* by \[decision (\d+)\]", text, re.M)
        assert status.startswith(f"changed by [{changed[1]}]") if changed else status == "holds"


def test_the_page_of_jobs_shows_a_report_as_the_command_prints_it() -> None:
    reports = (ROOT / "tests" / "golden" / "job.txt").read_text("utf-8").split("\n\njob ")
    assert code_blocks(ROOT / "docs" / "jobs.md")[1].rstrip() == reports[0]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_yaml_on_pages_is_valid(page: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert all(list(yaml.safe_load_all(block)) for block in blocks)
