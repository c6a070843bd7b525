"""Writes generated files: all with `make generate`, or one part with `python -m tools.NAME` in the root of a checkout.

`rules`, `grafana_alerts` and `dashboard` can also write a site's variant to another folder. They need no installed
gpu-exporter, only PyYAML, and for the dashboard grafana-foundation-sdk.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "exporter"))
