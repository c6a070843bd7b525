"""Renders a view as Prometheus text, OpenMetrics, JSON, table or page. A scrape never calls the driver."""
