"""Evidence on holders, from a PromQL API or from the exporters themselves."""
