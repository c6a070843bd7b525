"""Looks a value up in a snapshot by the name under which users see it."""

from __future__ import annotations

from gpu_exporter.model.readings import DeviceSnapshot


def value(snapshot: DeviceSnapshot, family: str, *labels: str) -> float | None:
    """None where this reading has none."""
    found = (sample for sample in snapshot.samples if sample.family.name == family and sample.labels == labels)
    return next((sample.value for sample in found), None)
