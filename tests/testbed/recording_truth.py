"""The truth of a recording: a separate parser of the raw logs that imports nothing of the project.

python recording_truth.py LOG.csv.gz     prints mean utilization (0 to 1) and mean power (watts)
"""

from __future__ import annotations

import csv
import datetime
import gzip
import sys


def means(path: str) -> tuple[float, float]:
    """Time-weighted means over the whole log: utilization (each row for the time up to it), power (trapezoid)."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    times = [datetime.datetime.strptime(row["timestamp"], "%Y/%m/%d %H:%M:%S.%f").timestamp() for row in rows]
    use = [float(row["utilization.gpu [%]"]) / 100 for row in rows]
    power = [float(row["power.draw.instant [W]"]) for row in rows]
    busy = energy = 0.0
    for i in range(1, len(rows)):
        step = times[i] - times[i - 1]
        busy += step * use[i]
        energy += step * (power[i] + power[i - 1]) / 2
    return busy / (times[-1] - times[0]), energy / (times[-1] - times[0])


if __name__ == "__main__":
    print(*means(sys.argv[1]))
