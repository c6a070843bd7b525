"""Writes every generated file. With `--check`, only compares them. For `make generate` and `make test`.

The order matters, because some files are made from others: the reference from the code, which needs its defaults; the
chart's copies from rules and dashboards. The dashboards need grafana-foundation-sdk and Python 3.11. With an older
Python they are skipped, except in CI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.files import ROOT, write_or_check

PACKAGE = ROOT / "exporter" / "gpu_exporter"
CONFIG = PACKAGE / "common" / "config"


def build_defaults() -> Mapping[Path, str]:
    from tools.defaults import render_defaults

    return {CONFIG / "defaults.py": render_defaults((CONFIG / "defaults.yaml").read_text("utf-8"))}


def build_docs() -> Mapping[Path, str]:
    from tools.causes_page import render_causes
    from tools.packages import render_architecture
    from tools.reference import render_reference

    page, causes, owners = (ROOT / "docs" / f"{name}.md" for name in ("architecture", "causes", "owners"))
    return {
        **{each: render_causes(each.read_text("utf-8")) for each in (causes, owners)},
        ROOT / "docs" / "metrics.md": render_reference(),
        page: render_architecture(page.read_text("utf-8"), PACKAGE),
    }


def build_rules() -> Mapping[Path, str]:
    from gpu_exporter.common.config.defaults import Alerts
    from tools.rules import RULES, build_all

    return {RULES / name: text for name, text in build_all(Alerts(), {}).items()}


def build_grafana_alerts() -> Mapping[Path, str]:
    from gpu_exporter.common.config.defaults import Alerts
    from tools.grafana_alerts import DATASOURCE, PATH, render
    from tools.rules import read_parameters

    return {PATH: render(read_parameters(Alerts(), {}), DATASOURCE)}


def build_alertmanager_config() -> Mapping[Path, str]:
    from tools import alertmanager_config, meanings

    return {**alertmanager_config.build_page(), **meanings.build_page()}


def build_dashboards() -> Mapping[Path, str]:
    if sys.version_info < (3, 11) and not os.environ.get("CI"):
        sys.stderr.write("the dashboard is not generated: grafana-foundation-sdk needs Python 3.11\n")
        return {}
    from gpu_exporter.common.config.defaults import Settings
    from tools.dashboard import DASHBOARDS, build_all

    return {DASHBOARDS / name: text for name, text in build_all(Settings()).items()}


def build_schema() -> Mapping[Path, str]:
    from tools.config_schema import build_all

    return build_all()


def build_commands() -> Mapping[Path, str]:
    from tools.commands import build_all

    return build_all()


def build_chart() -> Mapping[Path, str]:
    from tools.chart import build_all

    return build_all()


def build_values_page() -> Mapping[Path, str]:
    from tools.values_page import build_page

    return build_page()


STEPS: tuple[Callable[[], Mapping[Path, str]], ...] = (
    build_defaults,
    build_docs,
    build_rules,
    build_grafana_alerts,
    build_alertmanager_config,
    build_dashboards,
    build_schema,
    build_commands,
    build_chart,
    build_values_page,
)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    return max([write_or_check(step(), check) for step in STEPS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
