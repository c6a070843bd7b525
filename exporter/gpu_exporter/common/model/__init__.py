"""The records that the packages exchange: units, metrics, readings, holders, totals, views.

Standard library only. Names carry the units: `_s` is seconds, `_j` is joules. Ratios are 0 to 1. Times called `wall`
are Unix seconds, times called `monotonic` are seconds of CLOCK_MONOTONIC.
"""
