"""What is known of holders: from a PromQL API, or from the exporters themselves."""
