"""Looks up a value in a snapshot by the metric name that users see."""

from __future__ import annotations

from gpu_exporter.common.model.readings import DeviceSnapshot


def value(snapshot: DeviceSnapshot, family: str, *labels: str) -> float | None:
    """The value, None if this reading does not have it."""
    found = (sample for sample in snapshot.samples if sample.family.name == family and sample.labels == labels)
    return next((sample.value for sample in found), None)
