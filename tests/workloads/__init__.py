"""Training loops with known faults. They run as programs of their own, so the hook must be found without an installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "exporter" / "hook"))
