"""The records that rooms hand to each other: units, metrics, readings, holders, totals, views.

Standard library only. Units are in the names: seconds `_s`, joules `_j`, ratios are 0 to 1, times called `wall` are
Unix seconds and times called `monotonic` are seconds of CLOCK_MONOTONIC.
"""
