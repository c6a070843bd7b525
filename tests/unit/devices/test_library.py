"""Calls to the driver: only listed calls, only reads, in structures that fit."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import pynvml
import pytest

from gpu_exporter.agent.devices.nvml import library, structures
from gpu_exporter.agent.devices.nvml.device import NvmlDevice
from gpu_exporter.agent.devices.protocol import Device

NVML = Path(library.__file__).parent
# Every function of NVML that the exporter may call, and no other. No function sets state, and none sleeps on its own, as
# nvmlDeviceGetPcieThroughput does for 20 ms; nvmlEventSetWait_v2 waits in its own thread. RegisterEvents and the GPM
# samples change only objects of the caller.
ALLOWED = {
    "nvmlInit",
    "nvmlShutdown",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetSupportedClocksThrottleReasons",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes_v2",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmSampleGet",
    "nvmlGpmMigSampleGet",
    "nvmlGpmMetricsGet",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
    "nvmlEventSetFree",
}
CALL = re.compile(r"nvml(?:Device|System|Event|Gpm|Init|Shutdown|Unit|Vgpu|Gpu|Compute)\w*")


def functions_named(path: Path) -> set[str]:
    """NVML functions whose names are in a module's code or texts, without docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and CALL.fullmatch(node.attr):
            named.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            named |= {node.value} if CALL.fullmatch(node.value) else set()
    return named


def test_every_nvml_function_that_is_used_is_allowed() -> None:
    named = set().union(*(functions_named(path) for path in NVML.glob("*.py")))
    named -= {"nvmlEventTypeXidCriticalError", "nvmlDeviceGet"}  # a constant, and the beginning of a name
    named -= {"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"}  # keys of GRANTS
    used = named | set(library.CALLS) | set(library.LIVE_CALLS)
    assert used == ALLOWED


def test_every_allowed_nvml_function_only_reads() -> None:
    for name in ALLOWED:
        assert not re.search(r"Set(?!Create|Wait|Free)|Clear|Reset|Enable|Create(?!$)|Destroy|Throughput", name), name
        assert hasattr(pynvml, name), f"{name} is not a function of the newest binding"


def test_the_backend_makes_only_calls_of_the_list() -> None:
    """A call that is not in the list cannot be made."""
    with pytest.raises(KeyError):
        library.LiveLibrary().ask("nvmlDeviceSetPersistenceMode", library.SYSTEM, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "members"),
    [
        (structures.Value, pynvml.c_nvmlValue_t, {"dVal": "dVal", "ullVal": "ullVal"}),
        (structures.NvmlSample, pynvml.c_nvmlSample_t, {"stamp": "timeStamp", "value": "sampleValue"}),
        (
            structures.FieldValue,
            pynvml.c_nvmlFieldValue_t,
            {
                "field": "fieldId",
                "scope": "scopeId",
                "latency_us": "latencyUsec",
                "type": "valueType",
                "code": "nvmlReturn",
                "value": "value",
            },
        ),
        (
            structures.GpmMetric,
            pynvml.c_nvmlGpmMetric_t,
            {"metric": "metricId", "code": "nvmlReturn", "value": "value"},
        ),
        (structures.Temperature, pynvml.c_nvmlTemperature_v1_t, {"sensor": "sensorType", "celsius": "temperature"}),
        (structures.Margin, pynvml.c_nvmlMarginTemperature_v1_t, {"celsius": "marginTemperature"}),
    ],
)
def test_the_exporters_structures_have_the_layout_of_the_binding(
    ours: type[ctypes.Structure], theirs: type[ctypes.Structure], members: dict[str, str]
) -> None:
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    for mine, name in members.items():
        assert getattr(ours, mine).offset == getattr(theirs, name).offset
        assert getattr(ours, mine).size == getattr(theirs, name).size


def test_the_gpm_query_has_room_for_every_metric() -> None:
    assert structures.METRICS_MAX >= pynvml.NVML_GPM_METRIC_MAX
    for mine, name in {"count": "numMetrics", "first": "sample1", "second": "sample2", "metrics": "metrics"}.items():
        assert getattr(structures.GpmMetrics, mine).offset == getattr(pynvml.c_nvmlGpmMetricsGet_t, name).offset


def test_the_nvml_device_overrides_every_read_of_a_device() -> None:
    """A read that is not overridden counts as not supported; for NVML that would be a mistake."""
    asked = {name for name, value in vars(Device).items() if callable(value) and not name.startswith("_")}
    assert len(asked) > 25
    assert asked <= set(vars(NvmlDevice))
