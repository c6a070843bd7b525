"""How many samples of real clusters pass the conditions of a spin: `python -m tests.bench.stall_curves acme_cdfs.csv.gz`.

The file has distribution curves of two A100 clusters (InternLM/AcmeTrace, CC BY 4.0; Hu et al., NSDI'24): cluster,
metric, value, cumulative percent. Each curve is of one metric, so the share of samples with high utilization and low
power has only bounds (Frechet). More arguments: logs of nvidia-smi of single boards, whose columns belong together; by
default those of tests/fixtures/recordings.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_exporter.diagnosis.stalls.rules import StallRules

FLOOR_W, LIMIT_W = 55.0, 400.0  # A100 SXM
CUTS = (0.04, 0.06, 0.08, 0.10, 0.15, 0.25)
RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"
BOARDS = {"A100": (55.0, 400.0), "V100": (40.0, 300.0), "RTX3090": (26.0, 350.0)}


def share_up_to(curve: Sequence[tuple[float, float]], value: float) -> float:
    """Share of the samples up to `value`, 0 to 1: the highest cumulative percent at or below it."""
    return max((percent for x, percent in curve if x <= value), default=0.0) / 100.0


def read_curves(path: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            curves.setdefault((row["cluster"], row["metric"]), []).append((float(row["x"]), float(row["cdf_percent"])))
    return curves


def bounds(one: float, other: float) -> tuple[float, float]:
    """The least and the highest share for which both can hold."""
    return max(0.0, one + other - 1.0), min(one, other)


def print_cluster(path: Path) -> None:
    curves, rules = read_curves(path), StallRules()
    print("| cluster | share of the way | watts | samples up to it | and utilization >= 95 %, at least | at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for cluster in ("seren", "kalos"):
        full = 1.0 - share_up_to(curves[cluster, "gpu_util_pct"], 100.0 * rules.utilization_min - 0.001)
        for cut in CUTS:
            watts = FLOOR_W + cut * (LIMIT_W - FLOOR_W)
            low = share_up_to(curves[cluster, "gpu_power_w"], watts)
            least, most = bounds(full, low)
            print(f"| {cluster} | {cut:.0%} | {watts:.0f} | {low:.1%} | {least:.1%} | {most:.1%} |")


def print_recording(path: Path) -> None:
    """Samples of one board under square waves, by the column of utilization and that of power."""
    board = path.name.partition("_")[0]
    floor_w, limit_w = BOARDS[board]
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    rows = list(csv.DictReader(io.StringIO(text), skipinitialspace=True))
    power = next(name for name in rows[0] if name.startswith("power.draw.instant") or name == "power.draw [W]")
    found = [(float(row["utilization.gpu [%]"]), float(row[power])) for row in rows]
    for cut in (StallRules().low_alone_ratio, StallRules().low_ratio):
        watts = floor_w + cut * (limit_w - floor_w)
        both = sum(busy >= 95.0 and drawn <= watts for busy, drawn in found)
        full = sum(busy >= 95.0 for busy, _ in found)
        print(
            f"| {path.name} | {cut:.0%} | {watts:.0f} | {both / len(found):.2%} of all, {both} of {full} busy samples |"
        )


def main() -> int:
    print_cluster(Path(sys.argv[1]))
    print("\n| recording | share of the way | watts | utilization >= 95 % and up to these watts |")
    print("| --- | --- | --- | --- |")
    for path in [Path(each) for each in sys.argv[2:]] or sorted(RECORDINGS.glob("*.csv.gz")):
        print_recording(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
