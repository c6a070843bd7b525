"""The PCIe link runs below its maximum bandwidth while the GPU works. Only the site can repair it."""

from __future__ import annotations

from gpu_exporter.common.model.causes import MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, rule

LINK = Needs("the PCIe link of the GPU while it works (collector pcie-link)")


@rule(
    states=WORKING,
    needs="the bandwidth of the PCIe link while the GPU works, and its maximum in this slot (NVML)",
    against="a job that copies little is hardly slower (always shown)",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    if case.link is None:
        return LINK
    if case.link >= case.rules.link_ratio:
        return None
    return Cause(
        "link_degraded",
        MEDIUM,
        f"the PCIe link runs at {case.link_text} while the GPU works",
        against="a job that copies little is not slowed by it",
        values=numbers(link_ratio=case.link),
    )
