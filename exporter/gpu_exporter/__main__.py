"""`python -m gpu_exporter` is `gpu-exporter`."""

import sys

from gpu_exporter.cli import main

sys.exit(main())
