"""One scenario for each product and mode: the documentation of what the device side is tested with."""

from __future__ import annotations

from typing import Any

from gpu_exporter.devices.scenario import Scenario, parse_scenario

HALF = {"kind": "constant", "value": 0.5}
STEADY: dict[str, Any] = {
    "load": HALF,
    "encoder": {"kind": "constant", "value": 0.11},
    "decoder": {"kind": "constant", "value": 0.13},
    "pcie": {"kind": "constant", "value": 0.01},
    "throttle": [{"reason": "power_cap", "share": 0.25}, {"reason": "hw_thermal", "share": 0.125}],
    "health": {
        "ecc_corrected": 5,
        "ecc_uncorrected": 7,
        "remapped_corrected": 1,
        "remapped_uncorrected": 2,
        "remap_pending": 1,
        "retired_single_bit": 3,
        "retired_double_bit": 4,
        "recovery_action": 1,
        "pcie_replays": 9,
    },
}
LINKED = {**STEADY, "nvlink": {"kind": "constant", "value": 0.02}}
AMPERE_MIG = [{"profile": "3g.40gb", "load": HALF}, {"profile": "1g.10gb"}]
HOPPER_MIG = [
    {"profile": "3g.40gb", "load": HALF},
    {"profile": "1g.10gb", "gi": 9, "load": {"kind": "constant", "value": 0.75}},
    {"profile": "1c.2g.20gb", "gi": 5, "ci": 0, "load": {"kind": "constant", "value": 1}},
    {"profile": "1c.2g.20gb", "gi": 5, "ci": 1},
]
# name: the GPU, and a holder with memory where there is one
GENERATIONS: dict[str, dict[str, Any]] = {
    "T4": {"model": "T4", **STEADY},
    "V100": {"model": "V100", **LINKED},
    "A100": {"model": "A100", **LINKED},
    "A100 MIG": {"model": "A100", **LINKED, "mig": AMPERE_MIG},
    "H100": {"model": "H100", **LINKED},
    "H100 MIG": {"model": "H100", **LINKED, "mig": HOPPER_MIG},
    "H200": {"model": "H200", **LINKED},
    "B200": {"model": "B200", **LINKED},
    # Coherent memory: what the operating system keeps in the GPU's memory stays "used" when the program has gone.
    "GH200": {"model": "GH200", **LINKED},
}


def build(name: str, **changes: Any) -> Scenario:
    """One GPU of that generation, with a holder that uses 12 GiB."""
    gpu = {**GENERATIONS[name], **changes}
    holder = {"gpu": 0, "kind": "job", "name": "7", "processes": 2, "memory_gib": 12}
    if "mig" in gpu:
        holder["mig"] = 0
    return parse_scenario({"gpus": [gpu], "holders": [holder]})
