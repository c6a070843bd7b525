"""Starts gpu-exporter with the modules beside this file, and with the modules that were compiled for this machine."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILED = HERE / os.uname().machine
if not COMPILED.is_dir():
    sys.exit(f"gpu-exporter: {HERE} has no modules for {COMPILED.name}: install with pip in a virtual environment")
sys.path[:0] = [str(HERE), str(COMPILED)]

from gpu_exporter.cli.main import main  # noqa: E402 - after the path is set

main()
