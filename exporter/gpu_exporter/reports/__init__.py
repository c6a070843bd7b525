"""Writes the reports for people: use of a period, of a job, and backtests. Shows the table of nodes on a terminal."""
