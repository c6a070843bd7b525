"""Writes generated files: `make generate`, or one part with `python -m tools.NAME` in the checkout's root.

`rules`, `grafana_alerts` and `dashboard` can also write variants for a site to another folder. So they run from a
checkout that is not installed, with PyYAML, and for the dashboard with grafana-foundation-sdk.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))
