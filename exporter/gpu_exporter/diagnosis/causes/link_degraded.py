"""The PCIe link has less than its bandwidth while the GPU works. The site has to mend it, not the owner of the job."""

from __future__ import annotations

from gpu_exporter.diagnosis.causes.case import WORKING, CauseCase, Needs, Rule
from gpu_exporter.model.causes import MEDIUM, Cause

LINK = Needs("the PCIe link of the GPU while it works (collector pcie-link)")


def judge(case: CauseCase) -> Cause | Needs | None:
    if case.link is None:
        return LINK
    if case.link >= case.rules.link_ratio:
        return None
    return Cause(
        "link_degraded",
        MEDIUM,
        f"the PCIe link of the GPU has {case.link_text} while it works",
        against="a job that copies little does not notice it",
        advice="for the site: reseat the GPU or its riser, look for PCIe errors in the kernel's log; the job can move",
    )


RULE = Rule("link_degraded", "a slow PCIe link", WORKING, judge, (5, 52))
