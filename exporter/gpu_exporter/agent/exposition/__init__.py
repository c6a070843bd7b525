"""Renders a view (the state of the node at one moment) as Prometheus text, OpenMetrics, JSON, table or web page.

A scrape never calls the driver.
"""
