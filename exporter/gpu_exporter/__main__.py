"""Makes `python -m gpu_exporter` the same as `gpu-exporter`."""

import sys

from gpu_exporter.cli.main import main

sys.exit(main())
