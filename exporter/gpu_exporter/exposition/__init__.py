"""Bytes: one view in, Prometheus text, OpenMetrics, JSON, table or page out. A scrape cannot reach the driver."""
