"""Reads the reports of the other ranks on this node from the same directory, for the summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_exporter_torch.file import read_plain
from gpu_exporter_torch.report_rules import FILES_MAX, FORMAT, KEYS, SIZE_MAX


def read_siblings(directory: Path, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The reports of the other ranks of this training: the reports with the same format and the same `world_size`."""
    ranks: dict[int, dict[str, Any]] = {}
    if own["world_size"] < 2:
        return []
    for path in sorted(directory.glob("run-*.json"), key=_written, reverse=True)[:FILES_MAX]:
        try:
            report = json.loads(read_plain(path, SIZE_MAX))
        except (OSError, ValueError, RecursionError):
            continue
        is_ours = isinstance(report, dict) and report.get("format") == FORMAT and report.keys() >= set(KEYS)
        if is_ours and report["world_size"] == own["world_size"]:
            ranks.setdefault(report["rank"], report)  # of an earlier run of this rank, the newest file counts
    return [report for rank, report in ranks.items() if rank != own["rank"]]


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed at this moment
        return 0.0
