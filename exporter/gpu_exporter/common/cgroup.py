"""Finds the owner of a process in the path of its cgroup: a pod, a Slurm job, another container, or no owner.

Kubelet, container runtime and slurmstepd make the cgroups as root, so a job cannot choose its path. A login is the
exception: systemd gives everything below `user@UID.service` to the user, who can make a `job_99` there. So only the
parts before it can name a job or a pod. Containers below it count, because rootless podman and docker make them there.
Scopes of sessions (`session-N.scope`) belong to root. Forms (examples in the tests): cgroup v1, v2 and both together;
systemd's slices (`kubepods-burstable-pod<uid, _ for ->.slice/cri-containerd-<id>.scope`) and plain folders
(`kubepods/pod<uid>/<id>`); clusters inside a container (kind), where the outer container comes first; paths relative to
the reader's own cgroup namespace (`/../..`); Slurm's `slurm/uid_N/job_N`, `slurm_<node>`, `slurmstepd.scope/job_N`,
`<node>_slurmstepd.scope`, in any slice. Since Slurm 26.05, a path may contain the job's SLUID in place of its number.

Limits: with proctrack/linuxproc, a job's processes remain in slurmd's own cgroup, and the job is unknown. A process may
be moved, so the answer is valid only at this moment. A privileged pod or job can add cgroups below its own. So all pods
in a path count, but only the outermost job. Pods of a rootless Kubernetes (its kubelet runs below `user@UID.service`)
have no cgroup that names them: the owner of their processes, their work on CPUs and their end are unknown.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LINES_MAX = 64  # v1 has a dozen controllers
PART_MAX = 256  # a file name has at most 255 bytes
# The UID of a pod, or the hash of a static pod's manifest (32 digits without dashes), which is its UID for the kubelet.
POD = re.compile(
    r"(?:.*-)?pod([0-9a-f]{8}([-_])[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{4}\2[0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?"
)
CONTAINER = re.compile(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")
JOB = re.compile(r"job_([0-9]{1,10})")
STEP = re.compile(r"step_([0-9A-Za-z_+.-]{1,64})")
LOGIN = re.compile(r"user@.+\.service")
SLUID = re.compile(r"s[0-9A-HJKMNP-TV-Z]{13}")  # 13 digits of Crockford's base 32
# slurm_NODE of builds with several slurmd. A service whose name begins with slurm_ does not match.
SLURM = re.compile(r"slurm(?:_.+(?<!\.service)(?<!\.scope)(?<!\.slice))?|(?:.+_)?slurmstepd\.scope|slurmd\.service")


class ProcessOwner(NamedTuple):
    """The owner of a process. All fields are empty for the system, a session, or an owner of another kind.

    `pods`: UIDs in the path, outermost first. `slurm`: the process belongs to Slurm; `job` and `step` are "" if the
    path does not name them. `container`: the innermost container's id. `login`: a user owns a part of the path.
    """

    pods: tuple[str, ...] = ()
    slurm: bool = False
    job: str = ""
    step: str = ""
    container: str = ""
    login: bool = False

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler started the process."""
        return bool(self.pods) or self.slurm


def parse_cgroup(text: str) -> ProcessOwner:
    """Finds the owner in the content of /proc/PID/cgroup. Never raises: a text that cannot be parsed has no owner.

    Each line is `hierarchy:controllers:path`. The path may contain colons and any separator except a line feed. In v1,
    not every controller has a path with the job or pod, so the lines are judged together. If two lines name different
    jobs, the job is unknown.
    """
    owners = [_parse_path(path) for path in (line.split(":", 2)[-1] for line in text.split("\n")[:LINES_MAX])]
    jobs = {owner.job for owner in owners if owner.job}
    job = jobs.pop() if len(jobs) == 1 else ""
    steps = sorted({owner.step for owner in owners if job and owner.job == job and owner.step})
    return ProcessOwner(
        pods=tuple(dict.fromkeys(pod for owner in owners for pod in owner.pods)),
        slurm=any(owner.slurm for owner in owners),
        job=job,
        step=steps[0] if steps else "",
        container=next((owner.container for owner in owners if owner.container), ""),
        login=any(owner.login for owner in owners),
    )


def _parse_path(path: str) -> ProcessOwner:
    # runc with the wrong cgroup driver puts a slice, a runtime and an id into one part, with colons between them.
    parts = [piece for part in path.split("/") for piece in part[: 2 * PART_MAX].split(":")]
    pods: list[str] = []
    container = job = step = ""
    slurm = login = False
    for position, part in enumerate(parts):
        following = parts[position + 1] if position + 1 < len(parts) else ""
        if login or LOGIN.fullmatch(part):
            login = True
            container = match[1] if (match := CONTAINER.fullmatch(part)) else container
        elif match := POD.fullmatch(part):
            pods.append(match[1].replace("_", "-"))
        elif match := CONTAINER.fullmatch(part):
            container = match[1]
        elif SLURM.fullmatch(part):
            slurm = True
        elif (match := JOB.fullmatch(part)) and (slurm or STEP.fullmatch(following)):
            # Without a part of Slurm before it: the reader itself is in Slurm's cgroup namespace, and sees a relative
            # path.
            slurm, job = True, job or match[1]
        elif SLUID.fullmatch(part) and STEP.fullmatch(following):
            slurm = True
        elif job and not step and (match := STEP.fullmatch(part)):
            step = match[1]
    return ProcessOwner(tuple(pods), slurm, job, step, container, login)
