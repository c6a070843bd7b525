"""Writes every generated file. With `--check`, only compares them. For `make generate` and `make test`.

The order matters, because some files are made from others: the reference from the code, which needs its defaults; the
chart's copies from rules and dashboards. The dashboards need grafana-foundation-sdk and Python 3.11. With an older
Python they are skipped, except in CI.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.files import ROOT, write_or_check

PACKAGE = ROOT / "exporter" / "gpu_exporter"
CONFIG = PACKAGE / "common" / "config"
DOCS = ROOT / "docs"
PICTURE = DOCS / "architecture.md"  # of the packages


def build() -> Iterator[Mapping[Path, str]]:
    """Yields the text of each generated file by path. Files that are made from others come after them."""
    from tools.defaults import render_defaults

    yield {CONFIG / "defaults.py": render_defaults((CONFIG / "defaults.yaml").read_text("utf-8"))}

    from gpu_exporter.common.config.defaults import Settings
    from tools import alertmanager_config, chart, commands, config_schema, grafana_alerts, meanings, rules, values_page
    from tools.causes_page import render_causes
    from tools.packages import render_architecture
    from tools.reference import render_reference

    settings = Settings()
    yield {page: render_causes(page.read_text("utf-8")) for page in (DOCS / "causes.md", DOCS / "owners.md")}
    yield {DOCS / "metrics.md": render_reference()}
    yield {PICTURE: render_architecture(PICTURE.read_text("utf-8"), PACKAGE)}
    yield {rules.RULES / name: text for name, text in rules.build_all(settings.alerts, {}).items()}
    parameters = rules.read_parameters(settings.alerts, {})
    yield {grafana_alerts.PATH: grafana_alerts.render(parameters, grafana_alerts.DATASOURCE)}
    yield alertmanager_config.build_page()
    yield meanings.build_page()
    if sys.version_info >= (3, 11) or os.environ.get("CI"):
        from tools.dashboard import DASHBOARDS, build_all

        yield {DASHBOARDS / name: text for name, text in build_all(settings).items()}
    else:
        sys.stderr.write("the dashboard is not generated: grafana-foundation-sdk needs Python 3.11\n")
    yield config_schema.build_all()
    yield commands.build_all()
    yield chart.build_all()
    yield values_page.build_page()


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    return max(write_or_check(files, check) for files in build())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
