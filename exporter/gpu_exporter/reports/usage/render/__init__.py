"""Renders a usage report as text, HTML, mail, JSON or table of values. The same report gives the same bytes."""
