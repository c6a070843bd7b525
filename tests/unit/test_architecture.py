"""The products, their packages, and the one direction of their imports."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vermin
from tests.limits import advise
from tools.packages import draw_packages

from gpu_exporter.agent.collectors.contract import Collector, Cycle
from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.agent.collectors.registry import ALL
from gpu_exporter.agent.devices.products import PRODUCTS
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.exposition.catalog import fixed_groups
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules, Moment
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings

PACKAGE = Path(__file__).resolve().parents[2] / "exporter" / "gpu_exporter"
HOOK = PACKAGE.parent / "hook" / "gpu_exporter_torch"  # a distribution of its own

# The products, and what each may import of the others: whole packages, or the named modules and what lies below them.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "common": (),
    "diagnosis": ("common",),
    "agent": ("common", "diagnosis.interface"),
    "reconciler": ("common",),
    "reports": ("common", "reconciler.decision", "reconciler.evidence.records"),
    "cli": ("common", "agent", "diagnosis", "reconciler", "reports"),
    "contrib": (),
}
# Within a product, a package may import those on its left. "" are the product's own modules.
ORDER = {
    "agent": (
        *("devices", "collectors", "sampling", "ledger", "attribution", "slurm_collector", "inventory", "node"),
        *("exposition", "runtime"),
    ),
    "reconciler": ("evidence", "decision", "", "slurm", "kubernetes", "actions", "runtime"),
}
# Third-party packages, by place; each costs memory in every node agent.
THIRD_PARTY = {
    "agent/attribution": {"h2", "yaml"},
    "agent/devices": {"pynvml", "yaml"},
    "agent/runtime": {"prometheus_client"},
    "agent/slurm_collector": {"prometheus_client"},
    "common/config": {"yaml"},
    "common/web": {"yaml", "bcrypt", "prometheus_client"},  # the agent imports the module with the last one nowhere
    "diagnosis/host": {"psutil"},
    "reconciler": {"prometheus_client"},
    "reconciler/evidence": {"prometheus_client"},
    "reconciler/kubernetes": {"kubernetes", "urllib3", "yaml"},
}


def place_of(module: str) -> tuple[str, str]:
    """The product of a module of this package, and its package in the product, "" if it is the product's own."""
    product, *rest = module.split(".")
    is_below = bool(rest) and (PACKAGE / product / rest[0]).is_dir()
    return product, rest[0] if is_below else ""


def imports_of(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {
                f"{node.module}.{alias.name}" if node.module == "gpu_exporter" else node.module for alias in node.names
            }
    return names


def test_what_a_witness_looks_at_is_read_in_each_cycle_and_missed_where_it_fails() -> None:
    """Read less often it would be absent in between, and the GPU idle."""
    facts = set(Moment._fields) & {field.name for field in dataclasses.fields(Cycle)}
    assert {"gpm", "engines", "pcie", "nvlink", "power_w", "energy_j"} <= facts
    for path in (PACKAGE / "agent" / "collectors").glob("*.py"):
        source = path.read_text("utf-8")
        filled = {fact for fact in facts if re.search(rf"cycle\.{fact}(\[.*\])? = ", source)}
        made = [
            collector
            for collector in ALL
            if collector.collect and collector.collect.__module__.endswith(f".{path.stem}")
        ]
        for collector in made if filled else []:
            assert collector.witness, f"{path.name} fills {sorted(filled)}: its collector needs witness=True"
            assert not collector.every_s, f"{path.name} fills {sorted(filled)}: it must run in each cycle"


def test_every_collector_is_in_the_list_and_declares_what_it_publishes() -> None:
    """What is not declared has no line in docs/metrics.md, and no range that it is held against."""
    assert [collector.name for collector in ALL] == list(COLLECTORS) and list(COLLECTORS)[-1] == "mig"
    modules = [path.stem for path in (PACKAGE / "agent" / "collectors").glob("[a-z]*.py")]
    found = [
        value
        for name in modules
        for value in vars(importlib.import_module(f"gpu_exporter.agent.collectors.{name}")).values()
        if isinstance(value, Collector)
    ]
    assert {collector.name for collector in found} == {collector.name for collector in ALL}
    declared = {family for collector in ALL for family in (*collector.families, *collector.instance_families)}
    instances = [{"profile": "1g.10gb"}]
    for gpu in (*({"model": model} for model in PRODUCTS), {"model": "H100", "mig": instances}):
        clock = ManualClock()
        scenario = parse_scenario({"gpus": [gpu]})
        device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
        sampler = DeviceSampler(device, ALL, clock, activity_rules(Settings()))
        for _ in range(3):
            clock.advance(1.0)
            snapshot = sampler.sample()
        published = {s.family for group in (snapshot, *snapshot.instances) for s in group.samples}
        assert len(published) > 10
        assert published <= declared, f"{gpu}: not in the tuple of its collector"


def test_every_threshold_of_activity_is_a_setting_that_is_passed_on() -> None:
    known = {"interval_s", "interval_max_s", "driver_period_max_s"}  # of sampling, and of the driver
    ledger = Settings().ledger
    doubled = ledger._replace(
        **{name: 2 * getattr(ledger, name) for name in ActivityRules._fields if name not in known}
    )
    rules, changed = activity_rules(Settings()), activity_rules(Settings()._replace(ledger=doubled))
    assert {name for name in ActivityRules._fields if getattr(rules, name) == getattr(changed, name)} == known


@pytest.mark.parametrize(
    "path", sorted([*PACKAGE.glob("*/runtime/*.py"), PACKAGE / "cli" / "run_demo.py"]), ids=lambda path: str(path.name)
)
def test_app_is_wiring(path: Path) -> None:
    """What it puts together has packages of its own; a command that needs more than this has logic in it."""
    advise(path.name, len(path.read_text("utf-8").splitlines()), 250, so="move its logic into a package")


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_a_package_imports_nothing_when_it_is_loaded() -> None:
    """Threads import while others do (`--once`), and one that wants `a.b` while another loads `a`, which wants `a.b`, is
    a deadlock that Python ends with an error in one of them (3.11: _DeadlockError).
    """
    for path in PACKAGE.rglob("__init__.py"):
        body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert body == [] or path.parent == PACKAGE, f"{path}: put this into a module of the package"


def find_forbidden(name: str, imports: set[str]) -> list[str]:
    """The imports of one module that its product or its place in the product may not have."""
    product, folder = place_of(name)
    wrong = []
    for imported in sorted(imports):
        top, _, rest = imported.partition(".")
        if top != "gpu_exporter":
            allowed = THIRD_PARTY.get(f"{product}/{folder}".rstrip("/"), set())
            if top not in sys.stdlib_module_names and top not in allowed:
                wrong.append(imported)
            continue
        other, below = place_of(rest)
        if other == product:
            order = ORDER.get(product, ())
            if folder in order and below in order and order.index(below) > order.index(folder):
                wrong.append(imported)
        elif not any(rest == each or rest.startswith(f"{each}.") for each in MAY_IMPORT[product]):
            wrong.append(imported)
    return wrong


def test_products_import_each_other_only_as_the_table_says() -> None:
    """And packages of the agent and of the reconciler only those on their left."""
    wrong = []
    for path in MODULES:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name not in ("__init__", "__main__"):
            wrong += [f"{name} imports {each}" for each in find_forbidden(name, imports_of(path))]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("common.fetch", "gpu_exporter.agent.ledger.ring"),
        ("agent.node.state", "gpu_exporter.diagnosis.loop"),
        ("agent.ledger.ring", "gpu_exporter.agent.node.state"),
        ("diagnosis.loop", "gpu_exporter.agent.node.view"),
        ("reports.usage.tenants.read", "gpu_exporter.reconciler.cycle"),
        ("reconciler.cycle", "gpu_exporter.reconciler.actions.acts"),
        ("reconciler.kubernetes.marker", "gpu_exporter.reconciler.actions.acts"),
        ("agent.ledger.ring", "yaml"),
    ],
)
def test_an_import_that_the_table_forbids_is_found(name: str, imported: str) -> None:
    assert find_forbidden(name, {imported}) == [imported]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Nor a package, which those below it are part of."""
    modules = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES}
    names = set(modules.values())
    imports = {
        name: {found for found in imports_of(path) if found in names and found != name}
        for path, name in modules.items()
    }

    def reach(name: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if name in path:
            return (*path[path.index(name) :], name)
        if name in settled:
            return None
        circles = (reach(other, (*path, name)) for other in sorted(imports[name]))
        found = next((circle for circle in circles if circle is not None), None)
        settled.add(name)
        return found

    settled: set[str] = set()
    assert [circle for name in sorted(names) if (circle := reach(name, ())) is not None] == []


# What the hook imports beside the standard library, and where: the program that is observed has it, or does not use it.
HOOK_IMPORTS = {
    "lightning.py": {"lightning"},
    "prometheus.py": {"prometheus_client"},
    "transformers.py": {"transformers"},
}
HOOKS_MODULES = sorted(HOOK.glob("*.py"))


@pytest.mark.parametrize("path", HOOKS_MODULES, ids=lambda path: str(path.name))
def test_the_hook_needs_nothing_that_a_training_may_lack(path: Path) -> None:
    """Neither torch, which it finds where the program has loaded it, nor the exporter."""
    others = {name.partition(".")[0] for name in imports_of(path)} - sys.stdlib_module_names - {"gpu_exporter_torch"}
    assert others == HOOK_IMPORTS.get(path.name, set())


def unions_at_run_time(tree: ast.AST) -> list[int]:
    """Lines with `X | Y` of types outside of annotations, which Python has since 3.10."""
    lines: list[int] = []
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                lines += unions_at_run_time(node)
                sides = (
                    [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) else []
                )
                if any(isinstance(side, ast.Name) and hasattr(builtins, side.id) for side in sides):
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", HOOKS_MODULES, ids=lambda path: str(path.name))
def test_the_hook_runs_on_the_oldest_python_that_it_declares(path: Path) -> None:
    """Its syntax, what it takes from the standard library, and types that are made when it runs."""
    assert 'requires-python = ">=3.9"' in (HOOK.parent / "pyproject.toml").read_text("utf-8")
    source = path.read_text("utf-8")
    _, least = vermin.detect(source)
    assert least <= (3, 9)
    assert unions_at_run_time(ast.parse(source)) == []


@pytest.mark.parametrize(
    "line", ["isinstance(x, list | tuple)", "Fact: Any = int | None", "def f(x: int = int | str): ..."]
)
def test_a_union_that_is_made_at_run_time_is_found(line: str) -> None:
    assert unions_at_run_time(ast.parse(line)) == [1]
    assert unions_at_run_time(ast.parse("x: int | None = {} | y\ndef f(a: int | str) -> int | None: ...")) == []


def test_importing_the_hook_loads_nothing_but_the_standard_library_and_itself() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_exporter_torch; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, HOOK.parent], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert loaded == {"__main__", "gpu_exporter_torch"}


def test_the_rules_that_hook_and_exporter_share_need_nothing_of_either() -> None:
    assert {name.partition(".")[0] for name in imports_of(HOOK / "report_rules.py")} <= sys.stdlib_module_names


LINES_MAX, PARAMETERS_MAX = 60, 8
# Lists of flags, metrics or cases, which read best in one piece.
TABLES = {
    ("cli/agent_flags.py", "_add_pod_sources"),
    ("cli/agent_flags.py", "add_daemon_flags"),
    ("reconciler/telemetry.py", "__init__"),
}


@pytest.mark.parametrize(
    "path", [*MODULES, *HOOKS_MODULES], ids=lambda path: path.relative_to(PACKAGE.parent).as_posix()
)
def test_a_function_fits_on_a_screen_and_its_parameters_in_a_head(path: Path) -> None:
    where = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (where, node.name) not in TABLES:
            given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = [name for name in given if name not in ("self", "cls")]
            lines = (node.end_lineno or 0) - node.lineno + 1
            advise(f"lines of {node.name}", lines, LINES_MAX, so="name its steps")
            advise(f"parameters of {node.name}", len(parameters), PARAMETERS_MAX, so="make a record")


PACKAGE_MAX = 2500
# A runtime puts packages together, and grows with the number of commands.
PACKAGES_MAX = {"agent/runtime": 1400, "reconciler/runtime": 700}


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in MODULES} - {PACKAGE}), ids=lambda folder: str(folder.relative_to(PACKAGE))
)
def test_a_package_is_small_enough_to_know(folder: Path) -> None:
    """Without those below it. A larger one hides a package: see which prefix or subject its files share."""
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in folder.glob("*.py"))
    where = folder.relative_to(PACKAGE).as_posix()
    advise(f"lines of {where}", lines, PACKAGES_MAX.get(where, PACKAGE_MAX), so="divide it by prefix or subject")


def test_a_file_of_tests_has_one_subject() -> None:
    for path in (PACKAGE.parents[1] / "tests").rglob("*.py"):
        advise(f"lines of {path.name}", len(path.read_text("utf-8").splitlines()), 650, so="divide it by subject")


# Deadlines of sockets, threads and child processes, which end in the machine's time. All else takes a Clock.
MACHINE_TIME = {
    "agent/runtime/once.py",
    "agent/runtime/record.py",
    "agent/runtime/serve.py",
    "agent/attribution/kubelet/grpc_unix.py",
    "agent/attribution/poller.py",
    "agent/attribution/processes.py",  # the kernel dates processes since boot
    "agent/attribution/registry.py",  # when the node was started
    "agent/attribution/static.py",  # how long ago a file was changed
    "common/clock.py",
    "common/commands.py",
    "common/tasks.py",  # whether a thread hangs
    "diagnosis/training/files.py",  # the same; and the age of a file
    "diagnosis/host/evidence.py",  # the CPU time of its own thread, which bounds how often it looks
    "agent/devices/nvml/recording.py",  # how long a call takes is what it records
    "reconciler/evidence/exporters.py",
    "reconciler/kubernetes/client/api.py",
    "reconciler/evidence/promql.py",
    "agent/sampling/manager.py",
    "common/web/budget.py",  # and CPU time
    "common/web/crowd.py",
    "common/web/door.py",
}


def test_only_deadlines_of_the_machine_read_its_clock() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in MODULES if "time" in imports_of(path)}
    assert users == MACHINE_TIME


READS_OUTSIDE_TEXT = {
    *(("agent", "attribution"), ("agent", "slurm_collector"), ("common", "promql"), ("common", "slurm")),
    *(("reconciler", below) for below in ("", "evidence", "decision", "actions", "kubernetes", "slurm")),
}
# What takes more than is meant, or any length: `outside` has a bounded parser for each.
BARE = {"int", "float", "complex", "Decimal", "Fraction"}
BARE_METHODS = {
    "fromisoformat",
    "strptime",
    "fromtimestamp",
    "isdigit",
    "isdecimal",
    "isnumeric",
    "parsedate_to_datetime",
}


def bare_parsers(source: str) -> list[int]:
    """Lines on which a number or a time is read by Python's own functions, called or handed on."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in BARE_METHODS:
            lines.append(node.lineno)
        if not isinstance(node, ast.Call):
            continue
        called = {node.func.id} if isinstance(node.func, ast.Name) else set()
        handed = [*node.args, *(keyword.value for keyword in node.keywords)]
        is_look = bool(called & {"isinstance", "issubclass", "cast", "Counter", "defaultdict", "TypeVar"})
        names = called | ({each.id for each in handed if isinstance(each, ast.Name)} if not is_look else set())
        if names & BARE:
            lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if place_of(".".join(path.relative_to(PACKAGE).parts)) in READS_OUTSIDE_TEXT]
)
def test_text_from_outside_is_read_by_bounded_parsers(path: Path) -> None:
    """Numbers of our own are made whole by math.floor, and text of others is read in outside.py."""
    assert bare_parsers(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "int(text)",
        "float(row['x'])",
        "sum(map(int, rows))",
        "datetime.fromisoformat(text)",
        "Decimal(x)",
        "a.isdigit()",
        "read(text, parse=float)",
        "filter(str.isdecimal, rows)",
        "sorted(rows, key=int)",
    ],
)
def test_a_bare_parser_is_found_however_it_is_called(line: str) -> None:
    assert bare_parsers(f"x = {line}") == [1]


@pytest.mark.parametrize("line", ["isinstance(x, int)", "x: int = 3", "math.floor(x)", "int.from_bytes(x, 'big')"])
def test_a_type_is_no_parser(line: str) -> None:
    assert bare_parsers(line) == []


def test_every_product_is_in_the_table() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(MAY_IMPORT)


def test_a_class_name_means_one_thing() -> None:
    declared: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                declared.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in declared.items() if len(places) > 1} == {}


def test_only_the_nvml_backend_knows_pynvml() -> None:
    users = {path.name for path in MODULES if "pynvml" in imports_of(path)}
    assert users == {"gpm.py", "library.py"}


def test_the_agent_names_a_metric_where_it_is_defined_and_nowhere_else() -> None:
    """What other packages need of a reading they get as typed facts. Those who read over HTTP have only names."""
    families = {family.name for _, _, group in fixed_groups() for family in group}
    families |= {family.name for each in ALL for family in (*each.families, *each.instance_families)}
    assert len(families) > 80
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        if place.startswith(("agent/collectors/", "reconciler/", "reports/")) or place in (
            "agent/exposition/catalog.py",
            "agent/exposition/training.py",
            "common/promql/absence.py",
            "common/report_rules.py",  # a name that the hook publishes too
        ):
            continue
        words = {node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)}
        assert not words & families, f"{place} names {words & families}"


def test_the_picture_leaves_out_arrows_that_others_imply() -> None:
    imports: dict[str, set[str]] = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}}
    assert draw_packages(imports).splitlines()[2:-1] == ["  a --> b", "  b --> c", "  a --> d"]
