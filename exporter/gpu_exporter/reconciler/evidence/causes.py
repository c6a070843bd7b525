"""The causes of low utilization with their texts, from the status of an exporter (docs/status.schema.json)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpu_exporter.common.plain import one_line
from gpu_exporter.reconciler.evidence.records import CauseTexts, HolderName, PublishedCause, holder_name

STATUS = "/api/v1/status"
STATUS_MAX = 4 * 1024 * 1024  # characters; the status of 128 allocations has less than a tenth of that
TEXT_MAX = 400  # characters
CAUSES_MAX = 32  # of one allocation: there are fewer rules


def parse_causes(text: str, name: HolderName, uuids: Collection[str]) -> CauseTexts:
    """The causes of a holder on these GPUs and their MIG instances; empty where the text is no such status."""
    found: dict[tuple[str, str], Sequence[PublishedCause]] = {}
    if len(text) > STATUS_MAX:  # several are parsed at a time, and parsed JSON takes many times its text
        return {}
    try:
        allocations = list(json.loads(text)["allocations"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    for allocation in allocations:
        try:
            unit = str(allocation["uuid"]), str(allocation["mig"])
            if unit[0] in uuids and holder_name(allocation) == name:
                found[unit] = [_cause(each) for each in allocation.get("causes", [])[:CAUSES_MAX]]
        except (LookupError, TypeError, AttributeError):  # one odd allocation costs itself
            continue
    return found


def _cause(values: Mapping[str, Any]) -> PublishedCause:
    texts = {name: one_line(str(values.get(name, "")), TEXT_MAX) for name in PublishedCause._fields}
    return PublishedCause(**texts)
