"""`gpu-exporter backtest`: replays a policy on the history in Prometheus."""
