"""`python -m gpu_exporter` is `gpu-exporter`."""

import sys

from gpu_exporter.cli.main import main

sys.exit(main())
