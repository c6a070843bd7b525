"""The owner of a process, by every form of path that runtimes and Slurm are known to make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.cgroup import ProcessOwner, parse_cgroup

UID = "2c9f8a79-5391-454b-88cb-86190881cb96"
UNDER = UID.replace("-", "_")
OTHER = "7922aa99-d4aa-4885-a953-82976860b23a"
HASH = "eab5a3348cf1d0f9a6f1a3c5a7b2d4e6"
ID = "0123456789abcdef" * 4
POD = ProcessOwner(pods=(UID,), container=ID)
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice"

PODS = {
    "v2-systemd-containerd": (f"0::{BURSTABLE}/cri-containerd-{ID}.scope", POD),
    "v2-systemd-crio-guaranteed": (f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/crio-{ID}.scope", POD),
    "crio-with-a-group-below": (f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/crio-{ID}.scope/container", POD),
    "conmon": (f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/crio-conmon-{ID}.scope", POD),
    "v2-cgroupfs-burstable": (f"0::/kubepods/burstable/pod{UID}/{ID}", POD),
    "v2-cgroupfs-guaranteed": (f"0::/kubepods/pod{UID}/{ID}", POD),
    "v1-cgroupfs": (f"11:blkio:/kubepods/burstable/pod{UID}/{ID}", POD),
    "older-v1": (f"4:memory:kubelet/kubepods/besteffort/pod{UID}/{ID}", POD),
    "v1-systemd-crio": (f"1:name=systemd:{BURSTABLE}/crio-{ID}.scope", POD),
    "runc-with-the-wrong-driver": (
        f"13:memory:/system.slice/containerd.service/kubepods-besteffort-pod{UNDER}.slice:cri-containerd:{ID}",
        POD,
    ),
    "cri-dockerd": (f"0::{BURSTABLE}/docker-{ID}.scope", POD),
    "kind": (
        f"0::/system.slice/docker-{'f' * 64}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UNDER}.slice/cri-containerd-{ID}.scope",
        POD,
    ),
    "cgroup-root": (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDER}.slice/crio-{ID}.scope", POD),
    "static-pod": (f"0::/kubepods/burstable/pod{HASH}/{ID}", ProcessOwner(pods=(HASH,), container=ID)),
    "relative-systemd": (f"0::/../../kubepods-burstable-pod{UNDER}.slice/cri-containerd-{ID}.scope", POD),
    "relative-cgroupfs": (f"0::/../../pod{UID}/{ID}", POD),
    "a-pod-inside-a-pod": (
        f"0::/kubepods/pod{OTHER}/{'f' * 64}/kubelet/kubepods/pod{UID}/{ID}",
        ProcessOwner(pods=(OTHER, UID), container=ID),
    ),
    "v1-some-controllers": (f"9:name=systemd:/\n6:freezer:/\n4:memory:/kubepods/pod{UID}/{ID}\n0::/", POD),
}
JOBS = {
    "v1": ("6:freezer:/slurm/uid_5001/job_42/step_batch/task_0", ProcessOwner(slurm=True, job="42", step="batch")),
    "v1-node-name": ("4:memory:/slurm_n0/uid_5001/job_42/step_0/task_0", ProcessOwner(slurm=True, job="42", step="0")),
    "v2": ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", ProcessOwner(slurm=True, job="42", step="0")),
    "v2-node-name": (
        "0::/system.slice/n0_slurmstepd.scope/job_42/step_batch",
        ProcessOwner(slurm=True, job="42", step="batch"),
    ),
    "slice-of-the-site": (
        "0::/gpu.slice/slurmstepd.scope/job_42/step_extern",
        ProcessOwner(slurm=True, job="42", step="extern"),
    ),
    "special-task": (
        "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_special",
        ProcessOwner(slurm=True, job="42", step="0"),
    ),
    "het-step": (
        "0::/system.slice/slurmstepd.scope/job_42/step_0+1/user",
        ProcessOwner(slurm=True, job="42", step="0+1"),
    ),
    "sluid": ("0::/system.slice/slurmstepd.scope/sFADM7XW47K900/step_batch", ProcessOwner(slurm=True)),
    "stepd-at-rest": ("0::/system.slice/slurmstepd.scope/system", ProcessOwner(slurm=True)),
    "linuxproc": ("0::/system.slice/slurmd.service", ProcessOwner(slurm=True)),
    "relative": ("0::/../../job_42/step_0/user/task_0", ProcessOwner(slurm=True, job="42", step="0")),
    "relative-to-the-step": ("0::/../job_42/step_0", ProcessOwner(slurm=True, job="42", step="0")),
    "v1-and-systemd": (
        "9:name=systemd:/system.slice/slurmd.service\n6:freezer:/slurm_n0/uid_0/job_42/step_batch\n0::/",
        ProcessOwner(slurm=True, job="42", step="batch"),
    ),
    "container-of-a-job": (
        f"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/libpod-{ID}.scope",
        ProcessOwner(slurm=True, job="42", step="0", container=ID),
    ),
    "node-that-is-a-container": (
        f"4:memory:/docker/{ID}/slurm/uid_0/job_42/step_0",
        ProcessOwner(slurm=True, job="42", step="0", container=ID),
    ),
    "slurmd-in-a-pod": (
        f"0::/kubepods/pod{UID}/{ID}/system.slice/slurmstepd.scope/job_42/step_0",
        ProcessOwner((UID,), slurm=True, job="42", step="0", container=ID),
    ),
    "a-group-that-the-job-named": (
        "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/job_7/step_9",
        ProcessOwner(slurm=True, job="42", step="0"),
    ),
    "a-group-named-like-a-line": (
        "0::/slurm/uid_0/job_42/step_0/x\u2028\r6:freezer:/slurm/job_7/step_0",
        ProcessOwner(slurm=True, job="42", step="0"),
    ),
    "lines-that-differ": (
        "6:freezer:/slurm/uid_0/job_42/step_0\n4:memory:/slurm/uid_0/job_43/step_0",
        ProcessOwner(slurm=True),
    ),
}
REST = {
    "docker": (f"0::/system.slice/docker-{ID}.scope", ProcessOwner(container=ID)),
    "docker-cgroupfs": (f"11:blkio:/docker/{ID}", ProcessOwner(container=ID)),
    "podman": (f"0::/machine.slice/libpod-{ID}.scope/container", ProcessOwner(container=ID)),
    "root": ("0::/", ProcessOwner()),
    "service": ("0::/system.slice/nvidia-persistenced.service", ProcessOwner()),
    "login": ("0::/user.slice/user-1000.slice/session-3.scope", ProcessOwner()),
    "own-namespace": ("0::/..", ProcessOwner()),
    "job-without-slurm": ("0::/user.slice/job_42", ProcessOwner()),
    "pod-without-a-uid": ("0::/kubepods/podtrainer", ProcessOwner()),
    "a-name-like-a-sluid": ("0::/user.slice/sFADM7XW47K900", ProcessOwner()),
    "sluid-of-another-length": ("0::/user.slice/sFADM7XW47K9/step_0", ProcessOwner()),
    "empty": ("", ProcessOwner()),
}
MANAGER = "/user.slice/user-1000.slice/user@1000.service"
LOGINS = {
    "program": (f"0::{MANAGER}/app.slice/app-python.scope", ProcessOwner(login=True)),
    "manager": (f"0::{MANAGER}/init.scope", ProcessOwner(login=True)),
    "a-job-that-the-user-made": (f"0::{MANAGER}/job_99/step_0", ProcessOwner(login=True)),
    "a-slurmd-that-the-user-made": (
        f"0::{MANAGER}/app.slice/slurmstepd.scope/job_99/step_0",
        ProcessOwner(login=True),
    ),
    "a-sluid-that-the-user-made": (f"0::{MANAGER}/sFADM7XW47K900/step_0", ProcessOwner(login=True)),
    "a-pod-that-the-user-made": (f"0::{MANAGER}/kubepods-pod{UNDER}.slice", ProcessOwner(login=True)),
    "a-part-with-colons": (f"0::{MANAGER}:job_99:step_0", ProcessOwner(login=True)),
    "v1": (f"1:name=systemd:{MANAGER}/job_99/step_0\n4:memory:/user.slice", ProcessOwner(login=True)),
    "relative": ("0::/../../user@1000.service/job_99/step_0", ProcessOwner(login=True)),
    "rootless-podman": (
        f"0::{MANAGER}/user.slice/libpod-{ID}.scope/container",
        ProcessOwner(container=ID, login=True),
    ),
    "rootless-docker": (f"0::{MANAGER}/app.slice/docker.service/{ID}", ProcessOwner(container=ID, login=True)),
    "rootless-kubernetes": (
        f"0::{MANAGER}/user.slice/libpod-{'f' * 64}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-pod{UNDER}.slice/cri-containerd-{ID}.scope",
        ProcessOwner(container=ID, login=True),
    ),
    "login-in-a-job": (
        "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/user@1000.service/job_99/step_1",
        ProcessOwner(slurm=True, job="42", step="0", login=True),
    ),
    "login-in-a-pod": (
        f"0::{BURSTABLE}/cri-containerd-{ID}.scope/user.slice/user-0.slice/user@0.service/kubepods/pod{OTHER}",
        ProcessOwner(pods=(UID,), container=ID, login=True),
    ),
    "job-and-login-on-other-lines": (
        f"6:freezer:/slurm/uid_1000/job_42/step_extern\n1:name=systemd:{MANAGER}/job_99/step_0",
        ProcessOwner(slurm=True, job="42", step="extern", login=True),
    ),
}


@pytest.mark.parametrize(
    ("text", "owner"),
    [*PODS.values(), *JOBS.values(), *REST.values(), *LOGINS.values()],
    ids=[*PODS, *JOBS, *REST, *LOGINS],
)
def test_the_path_of_a_cgroup_shows_the_owner(text: str, owner: ProcessOwner) -> None:
    assert parse_cgroup(text) == owner
    assert parse_cgroup(text + "\n") == owner


PIECES = st.sampled_from(
    [
        *("kubepods", "kubepods.slice", f"pod{UID}", f"kubepods-pod{UNDER}.slice", f"cri-containerd-{ID}.scope", ID),
        *("slurm", "slurm_n0", "slurmstepd.scope", "job_42", "job_", "step_0", "sFADM7XW47K900", "task_0", "uid_0"),
        *(
            "..",
            "",
            "system.slice",
            "user.slice",
            "user@1000.service",
            f"pod{HASH}",
            f"docker-{ID}.scope",
            ":",
            "pod" * 100,
            "job_" + "9" * 30,
        ),
    ]
)
PATHS = st.lists(PIECES | st.text(max_size=20), max_size=12).map("/".join)
TEXTS = st.lists(st.tuples(st.integers(0, 99), st.text(max_size=5), PATHS), max_size=8).map(
    lambda lines: "\n".join(f"{number}:{names}:{path}" for number, names, path in lines)
)


@given(TEXTS | st.text())
def test_any_cgroup_text_names_only_owners_that_it_contains(text: str) -> None:
    owner = parse_cgroup(text)
    for pod in owner.pods:
        assert f"pod{pod}" in text or f"pod{pod.replace('-', '_')}" in text
    assert not owner.job or f"job_{owner.job}" in text
    assert not owner.step or f"step_{owner.step}" in text
    assert not owner.container or owner.container in text
    assert owner.slurm or not (owner.job or owner.step)


@given(PATHS, st.sampled_from([*PODS.values(), *JOBS.values()]))
def test_a_cgroup_below_an_owners_cgroup_never_hides_the_owner(path: str, case: tuple[str, ProcessOwner]) -> None:
    text, owner = case
    below = parse_cgroup("\n".join(f"{line}/{path.replace(chr(10), '')}" for line in text.splitlines()))
    assert set(owner.pods) <= set(below.pods)
    assert below.slurm or not owner.slurm
    assert below.job == owner.job or not owner.job or len(text.splitlines()) > 1


@given(PATHS, PATHS)
def test_a_path_below_a_logins_cgroup_names_no_job_and_no_pod(before: str, path: str) -> None:
    alone, below = (
        parse_cgroup(f"0::/{each}".replace("\n", "")) for each in (before, f"{before}/user@7.service/{path}")
    )
    assert below._replace(container="", login=False) == alone._replace(container="", login=False)
    assert below.login
    assert below.container or not alone.container


def test_an_endless_cgroup_text_is_read_in_part() -> None:
    assert parse_cgroup("0::/\n" * 100 + "0::/slurm/job_42/step_0") == ProcessOwner()
    assert parse_cgroup(f"0::/{'x' * 100_000}/slurm/job_42/step_0").job == "42"


@pytest.mark.parametrize("service", ["slurm_exporter.service", "slurm_check.scope", "slurm_tools.slice"])
def test_a_service_with_a_name_like_slurm_is_not_slurm(service: str) -> None:
    assert parse_cgroup(f"0::/system.slice/{service}\n") == ProcessOwner()
    assert parse_cgroup("0::/slurm_n0/uid_0/job_7/step_batch\n").job == "7"
