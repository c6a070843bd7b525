"""Builds the Grafana dashboards from grafana/*.py.

    python -m tools.dashboard               writes grafana/dashboards
    python -m tools.dashboard --output DIR --config.file FILE
                                            writes a variant elsewhere, with a site's own windows

Needs grafana-foundation-sdk (Python 3.11 or newer), a development dependency. The JSON files need no package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.config.load import ConfigError, load_settings
from grafana import fleet, holder, node, operations
from tools.files import ROOT, write_or_check

DASHBOARDS = ROOT / "grafana" / "dashboards"


def render(dashboard: Dashboard) -> str:
    """Returns the JSON text of a dashboard, with the same bytes as in its file."""
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(dashboard) + "\n"


def build_all(settings: Settings) -> dict[str, str]:
    """Returns the text of every dashboard by file name."""
    boards = {"fleet": fleet, "holder": holder, "node": node, "operations": operations}
    return {f"gpu-{name}.json": render(board.build(settings)) for name, board in boards.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the Grafana dashboards.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=DASHBOARDS, help="directory (default grafana/dashboards)")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--config.file", dest="config", type=Path, help="take windows and thresholds of this file")
    options = parser.parse_args(arguments)
    try:
        files = build_all(load_settings(options.config))
    except ConfigError as exc:
        sys.stderr.write(f"tools.dashboard: {exc}\n")
        return 2
    return write_or_check({options.output / name: text for name, text in files.items()}, options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
