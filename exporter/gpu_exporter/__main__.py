"""Makes `python -m gpu_exporter` the same as `gpu-exporter`."""

from gpu_exporter.cli.main import main

main()
