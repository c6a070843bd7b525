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


RULE = Rule(
    name="link_degraded",
    title="a slow PCIe link",
    states=WORKING,
    judge=judge,
    claims=(5, 52),
    needs=(
        "generation and lanes of the PCIe link while the GPU works, and the most that are possible in this slot (NVML)"
    ),
    against="always: a job that copies little does not notice it",
    remedy=(
        "For the site: reseat the GPU or its riser, look for PCIe errors in the log of the kernel. The "
        "job can move to another GPU."
    ),
)
