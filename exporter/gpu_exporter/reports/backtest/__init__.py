"""`gpu-exporter backtest`: replays a policy on the history of a site."""
