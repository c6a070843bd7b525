"""Builds the Grafana dashboard from panels.py and queries.py.

    python grafana/build.py                         writes grafana/dashboards
    python grafana/build.py --check                 says whether grafana/dashboards is up to date
    python grafana/build.py --output DIR --config.file FILE
                                                    writes a variant elsewhere, with a site's own windows

Needs grafana-foundation-sdk (Python 3.11 or newer), which is a development dependency; the JSON needs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # the SDK's requirement; what it generates needs nothing
    sys.stderr.write("grafana/build.py: skipped, since grafana-foundation-sdk needs Python 3.11\n")
    sys.exit(1 if os.environ.get("CI") else 0)

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "exporter")]  # so that it runs from a checkout, not installed

from alerts.build import write_or_check  # noqa: E402 - after the path is set
from grafana.panels import build_dashboard  # noqa: E402
from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402 - after the path is set
from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: E402

from gpu_exporter.config import ConfigError, load_settings  # noqa: E402
from gpu_exporter.defaults import Settings  # noqa: E402


def render(dashboard: Dashboard) -> str:
    """The JSON, byte for byte as it is stored."""
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(dashboard) + "\n"


def build_all(settings: Settings) -> dict[str, str]:
    """Every dashboard by its file name."""
    return {"gpu-allocation.json": render(build_dashboard(settings))}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build the Grafana dashboard.", allow_abbrev=False)
    parser.add_argument(
        "--output", type=Path, default=HERE / "dashboards", help="directory (default grafana/dashboards)"
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--config.file", dest="config", type=Path, help="take windows and thresholds of this file")
    options = parser.parse_args(arguments)
    try:
        files = build_all(load_settings(options.config))
    except ConfigError as exc:
        sys.stderr.write(f"build.py: {exc}\n")
        return 2
    return write_or_check({options.output / name: text for name, text in files.items()}, options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
