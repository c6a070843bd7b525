"""The exporter's table of NVML's numbers, compared with the binding's."""

from __future__ import annotations

import pynvml

from gpu_exporter.agent.devices.nvml import constants


def test_numbers_agree_with_the_binding() -> None:
    checked = 0
    for name, value in vars(constants).items():
        if name.startswith("NVML_") and hasattr(pynvml, name):
            assert getattr(pynvml, name) == value, name
            checked += 1
    assert checked >= 15
    assert pynvml.nvmlMemory_v2 == constants.NVML_MEMORY_V2


def test_error_names_agree_with_the_binding() -> None:
    for number, name in constants.ERROR_NAMES.items():
        assert getattr(pynvml, name, number) == number, name


def test_throttle_bits_agree_with_the_binding() -> None:
    names = {
        "power_cap": "SwPowerCap",
        "hw_slowdown": "HwSlowdown",
        "sync_boost": "SyncBoost",
        "sw_thermal": "SwThermalSlowdown",
        "hw_thermal": "HwThermalSlowdown",
        "hw_power_brake": "HwPowerBrakeSlowdown",
    }
    for reason, name in names.items():
        assert getattr(pynvml, f"nvmlClocksThrottleReason{name}") == constants.THROTTLE_BITS[reason]
