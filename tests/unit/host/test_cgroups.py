"""The kernel's accounting of pods and jobs, in both layouts."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.model.holders import Who
from gpu_exporter.diagnosis.host.cgroups import DEPTH_MAX, CgroupReading, Cgroups

UID = "5a89bcaa-3509-4375-83e1-b9e7a5712123"
OTHER = "0a89bcaa-3509-4375-83e1-b9e7a5712123"
POD: Who = ("pod", UID)
JOB: Who = ("job", "42")
SLICE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
IO = "8:0 rbytes=1000 wbytes=200 rios=3 wios=4 dbytes=7 dios=1\n259:1 rbytes=30 wbytes=4 rios=1 wios=1\n"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")


def v2(root: Path, place: str, **files: str) -> Cgroups:
    write(root, cgroup__controllers="cpu io\n")
    write(root / place, **files)
    return Cgroups(root)


def test_the_counters_of_a_pod_are_read_in_version_2(tmp_path: Path) -> None:
    text = "usage_usec 2500000\nuser_usec 2000000\nnr_periods 0\n"
    cgroups = v2(tmp_path, SLICE, cpu__stat=text, io__stat=IO, cpu__max="150000 100000\n")
    write(tmp_path / SLICE / "cri-containerd-1.scope", cpu__stat="usage_usec 7\n")
    found = cgroups.find({POD, JOB})
    assert found == {POD: PurePosixPath(SLICE)}
    assert cgroups.read(found[POD]) == CgroupReading(2.5, 1234.0, 1.5)


@pytest.mark.parametrize(
    ("files", "reading"),
    [
        ({"cpu__stat": "usage_usec 0\n"}, CgroupReading(0.0)),
        ({"cpu__stat": "usage_usec 1\n", "cpu__max": "max 100000\n", "io__stat": ""}, CgroupReading(1e-6, 0.0)),
        ({"cpu__stat": "usage_usec 1\n", "cpuset__cpus__effective": "0-3,8\n"}, CgroupReading(1e-6, None, 5.0)),
        (
            {"cpu__stat": "usage_usec 1\n", "cpuset__cpus__effective": "0-3\n", "cpu__max": "50000 100000\n"},
            CgroupReading(1e-6, None, 0.5),
        ),
        ({"cpu__stat": "usage_usec 1\n", "cpuset__cpus__effective": "x-y\n", "cpu__max": "no\n"}, CgroupReading(1e-6)),
        ({"cpu__stat": "usage_usec many\n"}, None),
        ({"io__stat": IO}, None),
        ({}, None),
    ],
)
def test_a_missing_or_invalid_counter_is_unknown(
    files: dict[str, str], reading: CgroupReading | None, tmp_path: Path
) -> None:
    cgroups = v2(tmp_path, "slurm/uid_0/job_42", **files)
    assert cgroups.read(cgroups.find({JOB})[JOB]) == reading


def test_the_counters_of_a_job_are_read_from_the_separate_trees_of_version_1(tmp_path: Path) -> None:
    place = "slurm/uid_1000/job_42"
    write(tmp_path / "cpu,cpuacct" / place, cpuacct__usage="3000000000\n", cpu__cfs_quota_us="-1\n")
    write(tmp_path / "cpu,cpuacct" / place / "step_0", cpuacct__usage="1\n")
    write(tmp_path / "blkio" / place)
    (tmp_path / "blkio" / place / "blkio.throttle.io_service_bytes").write_text("8:0 Read 5\n8:0 Total 9\nTotal 9\n")
    write(tmp_path / "cpuset" / place, cpuset__effective_cpus="4-7\n")
    cgroups = Cgroups(tmp_path)
    found = cgroups.find({POD, JOB})
    assert found == {JOB: PurePosixPath(place)}
    assert cgroups.read(found[JOB]) == CgroupReading(3.0, 9.0, 4.0)
    (tmp_path / "cpu,cpuacct" / place / "cpuacct.usage").unlink()
    assert cgroups.read(found[JOB]) is None


def test_a_cgroup_that_a_pod_creates_below_its_own_still_belongs_to_the_pod(tmp_path: Path) -> None:
    """The outermost folder with a pod's name is the kubelet's. A step belongs to its job."""
    forged = f"{SLICE}/x/pod{OTHER}"
    cgroups = v2(tmp_path, forged, cpu__stat="usage_usec 1\n")
    real = f"kubepods.slice/kubepods-pod{OTHER.replace('-', '_')}.slice"
    write(tmp_path / real, cpu__stat="usage_usec 2\n")
    assert cgroups.find({("pod", OTHER)}) == {("pod", OTHER): PurePosixPath(real)}


def test_the_work_of_a_login_is_not_counted_for_a_job_or_pod_that_its_cgroup_names(tmp_path: Path) -> None:
    manager = "user.slice/user-1000.slice/user@1000.service"
    cgroups = v2(tmp_path, f"{manager}/job_42/step_0", cpu__stat="usage_usec 1\n")
    write(tmp_path / manager / f"pod{UID}", cpu__stat="usage_usec 1\n")
    assert cgroups.find({POD, ("job", "42")}) == {}
    assert cgroups.list_pods({UID}) == {}


def test_a_cgroup_search_follows_no_links_and_has_a_depth_limit(tmp_path: Path) -> None:
    deep = "/".join(["a"] * DEPTH_MAX) + f"/pod{UID}"
    cgroups = v2(tmp_path, deep, cpu__stat="usage_usec 1\n")
    (tmp_path / "link").symlink_to(tmp_path / "a/a/a/a/a/a")
    assert cgroups.find({POD}) == {}
    assert cgroups.list_pods({UID}) is None, "deeper folders are not searched, so the pod may be there"
    assert Cgroups(tmp_path / "nowhere").find({POD}) == {}


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_no_content_of_a_cgroup_file_raises(
    tmp_path_factory: pytest.TempPathFactory, stat: str, io: str, quota: str
) -> None:
    folder = tmp_path_factory.mktemp("cgroups")
    cgroups = v2(folder, "slurm/job_42")
    for name, text in (("cpu.stat", f"usage_usec {stat}"), ("io.stat", io), ("cpu.max", quota)):
        (folder / "slurm/job_42" / name).write_bytes(text.encode())
    reading = cgroups.read(PurePosixPath("slurm/job_42"))
    assert reading is None or (reading.cpu_s >= 0.0 and (reading.io_bytes or 0.0) >= 0.0)


LAYOUTS = {
    # https://github.com/kubernetes/kubernetes: pkg/kubelet/cm, by cgroup driver; kind: the node itself is a container.
    "systemd": "kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-pod{under}.slice/cri-containerd-{container}.scope",
    "guaranteed": "kubepods.slice/kubepods-pod{under}.slice/crio-{container}.scope/container",
    "cgroupfs": "kubepods/{qos}/pod{uid}/{container}",
    "kind": "system.slice/docker-{container}.scope/kubelet.slice/kubelet-kubepods.slice/"
    "kubelet-kubepods-{qos}.slice/kubelet-kubepods-{qos}-pod{under}.slice/cri-containerd-{container}.scope",
}


def place_of(layout: str, uid: str) -> str:
    return LAYOUTS[layout].format(uid=uid, under=uid.replace("-", "_"), qos="besteffort", container="a" * 64)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pods_with_a_cgroup_are_listed_in_every_layout(layout: str, version: str, tmp_path: Path) -> None:
    root = tmp_path if version == "v2" else tmp_path / "cpu,cpuacct"
    if version == "v2":
        write(tmp_path, cgroup__controllers="cpu io\n")
    write(root / place_of(layout, UID))
    write(root / "system.slice" / "sshd.service")
    found = Cgroups(tmp_path).list_pods({UID, OTHER})
    assert found is not None and found.keys() == {UID}
    assert found[UID] in PurePosixPath(place_of(layout, UID)).parents
    assert Cgroups(tmp_path).list_pods(set()) == {}
    inside = next(each for each in found[UID].parents if each.name.removesuffix(".slice").endswith("kubepods"))
    write(root / place_of(layout, OTHER))
    assert Cgroups(tmp_path).list_pods_inside(inside) == {UID, OTHER}
    assert Cgroups(tmp_path).list_pods_inside(PurePosixPath("nowhere")) is None


def test_an_incomplete_cgroup_search_does_not_list_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cgroups(tmp_path / "nowhere").list_pods({UID}) is None
    assert Cgroups(tmp_path).list_pods({UID}) is None  # neither version 1 nor 2
    place = PurePosixPath(place_of("systemd", UID)).parent
    cgroups = v2(tmp_path, place_of("systemd", UID))
    for name in "abc":
        write(tmp_path / name)
    assert cgroups.list_pods({UID, OTHER}) == {UID: place}
    monkeypatch.setattr("gpu_exporter.diagnosis.host.cgroups.FOLDERS_MAX", 4)
    assert cgroups.list_pods({UID, OTHER}) is None
    monkeypatch.undo()
    real = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert cgroups.list_pods({UID, OTHER}) is None
    assert cgroups.list_pods({UID}) == {UID: place}  # a pod that is found is present
