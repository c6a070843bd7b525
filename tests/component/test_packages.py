"""Archive, deb and rpm of `make packages`: installed as docs/slurm.md says, used, upgraded and removed in chroots."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tools import node_package

from gpu_exporter.common.version import VERSION
from tests.component import slurm_host
from tests.component.package_host import GPU, START, STATE, Driver, check_use_and_upgrade, make_driver
from tests.testbed.chroots import Chroot, debian_root
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.servers import require
from tests.testbed.slurm import GPUS, chroot_of, start_slurm
from tests.testbed.written import ROOT, checkout, code_block

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "slurm.md"
BOOKWORM = ("packages-bookworm-2", "bookworm", ("python3", "python3-venv", "systemd", "procps", "ca-certificates"))
ON_SLURM = ("packages-slurm-bookworm-1", "bookworm", ("python3", "systemd", "procps", "slurm-client"))
TRIXIE = ("packages-trixie-2", "trixie", ("python3", "systemd", "procps", "rpm"))  # Python 3.13


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two builds of this version and one of the next, by name."""
    require("rpmbuild")
    folder = tmp_path_factory.mktemp("packages")
    with pytest.MonkeyPatch.context() as patch:
        for name, version in (("now", VERSION), ("again", VERSION), ("next", "99.0")):
            patch.setattr(node_package, "VERSION", version)
            lines = node_package.build(folder / name)
            assert len(lines) == 3, lines
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def enter(tmp_path: Path) -> Callable[[tuple[str, str, tuple[str, ...]]], Chroot]:
    return lambda about: Chroot(debian_root(*about), tmp_path / "chroot")


@pytest.fixture
def nvml(nvml_directory: Path, nvml_table: NvmlTable) -> Driver:
    return make_driver(nvml_directory, nvml_table)


def box(text: str) -> str:
    """The only block of docs/slurm.md with this text. No systemd runs in a chroot: START starts the unit."""
    return code_block(PAGE, text).replace("systemctl enable --now", "systemctl enable")


def test_the_same_commit_gives_the_same_bytes_and_checksums(built: dict[str, Path]) -> None:
    assert (built["now"] / "SHA256SUMS").read_bytes() == (built["again"] / "SHA256SUMS").read_bytes()
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built["again"], capture_output=True)
    assert (done.returncode, done.stdout.count(b": OK")) == (0, 3)


def test_the_archive_has_no_module_of_one_python_and_nothing_of_kubernetes(built: dict[str, Path]) -> None:
    with tarfile.open(built["now"] / f"gpu-exporter-{VERSION}-node.tar.gz") as archive:
        names = archive.getnames()
        assert {(each.uid, each.gid) for each in archive} == {(0, 0)}
    assert all(name.split("/")[0] == "gpu-exporter" for name in names)
    modules = {name.removeprefix("gpu-exporter/lib/") for name in names if ".so" in name}
    stable = ("psutil/_psutil_linux.abi3.so", "bcrypt/_bcrypt.abi3.so")
    assert modules == {f"{machine}/{name}" for machine in node_package.MACHINES for name in stable}
    packages = {name.split("/")[2] for name in names if name.count("/") == 2 and name.startswith("gpu-exporter/lib/")}
    assert {"kubernetes", "urllib3", "torch", "gpu_exporter_torch"}.isdisjoint(packages)
    licensed = {re.match(r"\w+", name.split("/")[-3]) for name in names if "LICENSE" in name and "dist-info" in name}
    assert len(licensed) >= 6


def test_a_module_that_needs_a_newer_glibc_is_refused(tmp_path: Path) -> None:
    import zipfile

    for newest, refused in ((28, False), (29, True)):
        wheel = tmp_path / f"w{newest}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("a/a.abi3.so", b"\0GLIBC_2.2.5\0GLIBC_2.%d\0" % newest)
        try:
            node_package.unpack(wheel, tmp_path / "lib", "x86_64")
        except node_package.PackageError as exc:
            assert refused and str(exc) == "w29.whl: a/a.abi3.so needs glibc 2.29, at most 2.28 is allowed"
        else:
            assert not refused and (tmp_path / "lib" / "x86_64" / "a" / "a.abi3.so").is_file()


def test_what_the_rpm_needs_is_in_rhel_8_and_9(built: dict[str, Path], enter: Callable[..., Chroot]) -> None:
    out = enter(TRIXIE).run(f"cd {built['now']} && rpm -qpR *.rpm && rpm -qpc *.rpm", folders=[built["now"]])
    needs = {line for line in out.splitlines() if not line.startswith("rpmlib(")}
    assert needs == {
        "/bin/sh",
        "(python3 >= 3.10 or python3.11 or python3.12 or python3.13 or python3.14)",
        "/etc/gpu-exporter/config.yaml",
        "/etc/gpu-exporter/environment",
    }
    # rpm 4.14 of RHEL 8 knows these, and not each compression.
    assert set(re.findall(r"rpmlib\((\w+)\)", out)) == {
        "CompressedFileNames", "FileDigests", "PayloadFilesHavePrefix", "RichDependencies",
    }  # fmt: skip


def test_the_deb_is_installed_used_upgraded_and_removed(
    built: dict[str, Path], enter: Callable[..., Chroot], nvml: Driver
) -> None:
    chroot = enter(BOOKWORM)
    environment, places = nvml
    now, following = built["now"], built["next"]
    chroot.run("touch /started", environment, [*places, now, following])
    before = chroot.files()
    out = chroot.run(f"cd {now}\n{box('gpu-exporter_*_all.deb')}", environment, [*places, now])
    assert out.count("H100") == 2 and "no source of holders is configured" in out  # no Slurm is here
    again = f"DEBIAN_FRONTEND=noninteractive apt-get install -y {following}/gpu-exporter_*_all.deb"
    check_use_and_upgrade(chroot, nvml, again, [following])
    chroot.run("apt-get remove -y gpu-exporter")
    kept = chroot.files() - before
    assert {each.split("/")[1] for each in kept} == {"etc", "var"} and f"{STATE}/state" in kept
    chroot.run("apt-get purge -y gpu-exporter")
    assert chroot.files() ^ before <= {"/opt"}  # dpkg removes an empty folder that a package has


def test_the_rpm_is_installed_used_upgraded_and_removed(
    built: dict[str, Path], enter: Callable[..., Chroot], nvml: Driver
) -> None:
    """By rpm itself in place of dnf; Debian's has no record of its python3."""
    chroot = enter(TRIXIE)
    environment, places = nvml
    now, following = built["now"], built["next"]
    chroot.run("touch /started", environment, [*places, now, following])
    before = chroot.files()
    lines = box("./gpu-exporter-*.noarch.rpm").replace("dnf install -y", "rpm --install --nodeps")
    out = chroot.run(f"cd {now}\n{lines}", environment, [*places, now])
    assert out.count("H100") == 2 and "no source of holders is configured" in out  # no Slurm is here
    check_use_and_upgrade(chroot, nvml, f"rpm --upgrade --nodeps {following}/*.rpm", [following])
    chroot.run("rpm --erase gpu-exporter")
    assert chroot.files() ^ before <= {"/opt", "/etc/gpu-exporter", "/etc/gpu-exporter/config.yaml.rpmsave"}


def test_the_archive_runs_from_its_folder(built: dict[str, Path], enter: Callable[..., Chroot], nvml: Driver) -> None:
    chroot = enter(TRIXIE)
    environment, places = nvml
    chroot.run(f"cd {built['now']}\n{box('-node.tar.gz -C /opt')}", folders=[built["now"]])
    once = "gpu-exporter --once --no-attribution.slurm"
    assert GPU in chroot.run(once, environment, places)
    assert chroot.run(START, environment, places) == ""
    assert "serving on" in chroot.run("cat /started")
    assert chroot.run("gpu-exporter contrib") == "/opt/gpu-exporter/lib/gpu_exporter/contrib\n"
    # At another place, with a user's own Python packages, which are not used.
    moved = "mkdir /elsewhere; mv /opt/gpu-exporter /elsewhere/here; mkdir /tmp/own; echo 'import os; os._exit(9)' >/tmp/own/sitecustomize.py"
    chroot.run(moved)
    config = "echo 'gpus: [{model: T4}]' >/tmp/node.yaml; cd /tmp/own; PYTHONPATH=/tmp/own /elsewhere/here/bin/"
    assert "T4" in chroot.run(f"{config}{once} --state.directory= --devices.scenario=/tmp/node.yaml")


@pytest.mark.slurm
def test_the_archive_knows_the_job_of_a_real_slurm_whose_commands_come_first_on_path(
    built: dict[str, Path],
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The commands in /usr/bin are those of another release."""
    with tarfile.open(built["now"] / f"gpu-exporter-{VERSION}-node.tar.gz") as archive:
        archive.extractall(tmp_path, filter="tar")
    monkeypatch.setattr(slurm_host, "GPU_EXPORTER", [str(tmp_path / "gpu-exporter" / "bin" / "gpu-exporter")])
    with start_slurm(processes, chroot_of("24.11")) as slurm:
        job = slurm.submit("--gres=gpu:1")
        host = slurm_host.Host(slurm, nvml_environment, nvml_table)
        assert list(host.held()) == [job]
        path = subprocess.run(
            [tmp_path / "gpu-exporter" / "bin" / "python", "-c", "import os; print(os.environ['PATH'])"],
            env=host.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert path.stdout == f"{host.environment['PATH']}\n"


# As systemd starts the unit; the administrator then looks until all three allocations have a state.
FIRST_FINDING = """echo 'diagnosis: {window: 20s, hold: 1s}' >/etc/gpu-exporter/config.yaml
set -a
. /etc/gpu-exporter/environment
set +a
$(sed -n 's/^ExecStart=//p' /usr/lib/systemd/system/gpu-exporter.service) 2>/started &
daemon=$!
for each in $(seq 120); do
    gpu-exporter --once --format json >/status 2>/problems || :
    [ "$(grep -c '"state": "held_idle"' /status)" = 3 ] && break
    sleep 1
done
gpu-exporter holders
kill $daemon
wait
"""


@pytest.mark.slurm
def test_the_lines_of_the_page_lead_from_the_deb_to_the_first_finding_on_a_real_node(
    built: dict[str, Path],
    enter: Callable[..., Chroot],
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_directory: Path,
    nvml_table: NvmlTable,
) -> None:
    with start_slurm(processes) as slurm:
        chroot, etc = enter(ON_SLURM), slurm.root / "etc"
        (slurm.root / "jobs").mkdir()
        slurm_host.plug(nvml_table, range(GPUS))
        feeder = ScenarioFeeder(slurm_host.SCENARIO, nvml_table)
        feeder.start()
        environment = {
            "LD_LIBRARY_PATH": str(nvml_directory),
            "GPU_EXPORTER_NVML_TABLE": str(nvml_table.path),
            "SLURM_CONF": str(etc / "slurm.conf"),
            "GPU_EXPORTER_ATTRIBUTION_SLURM_NODE": "n0",
            "GPU_EXPORTER_ATTRIBUTION_SLURM_JOB_FILES": str(slurm.root / "jobs"),
            "GPU_EXPORTER_ATTRIBUTION_KUBELET": "false",
            "GPU_EXPORTER_WEB_LISTEN_ADDRESS": f"127.0.0.1:{free_port()}",
        }
        places = [nvml_directory, nvml_table.path.parent, slurm.root, built["now"]]
        first = slurm.submit("--gres=gpu:1")
        out = chroot.run(f"cd {built['now']}\n{box('gpu-exporter_*_all.deb')}", environment, places)
        assert re.search(rf"^\d +GPU-\S+ +job {first} ", out, re.MULTILINE), out
        scripts, lines = box("prolog.sh /etc/slurm/prolog.d"), code_block(PAGE, "\nProlog=/etc/slurm/prolog.d/*")
        own = f"sed -i 's#/run/gpu-exporter/jobs#{slurm.root}/jobs#' {etc}/prolog.d/* {etc}/epilog.d/*"
        script = f"{box('files=$(gpu-exporter contrib)')}{scripts}{own}".replace("/etc/slurm/", f"{etc}/")
        chroot.run(script, environment, places)
        with (etc / "slurm.conf").open("a", encoding="utf-8") as file:
            file.write(lines.replace("/etc/slurm/", f"{etc}/"))
        slurm.run("scontrol", "reconfigure")
        second = slurm.submit("--gres=gpu:2")
        wait_for((slurm.root / "jobs" / second).exists, "the prolog's file")
        try:
            out = chroot.run(FIRST_FINDING, environment, places)
        finally:
            feeder.stop()
        status = json.loads(chroot.run("cat /status"))
        states = sorted((each["job_id"], each["state"]) for each in status["allocations"])
        assert states == [(first, "held_idle"), (second, "held_idle"), (second, "held_idle")], chroot.run(
            "cat /started /problems"
        )
        assert out.count(f"job {second} ") == 2 and "source slurm: answers" in out


def test_without_a_python_that_is_new_enough_the_launcher_says_which_to_install(
    built: dict[str, Path], enter: Callable[..., Chroot]
) -> None:
    chroot = enter(TRIXIE)
    old = "rm /usr/bin/python3*; printf '#!/bin/sh\\nexit 1\\n' >/usr/bin/python3; chmod 755 /usr/bin/python3"
    chroot.run(
        f"tar -xzf {built['now']}/*-node.tar.gz -C /opt; mv /usr/bin/python3.13 /root/; {old}", folders=[built["now"]]
    )
    done = chroot.attempt("/opt/gpu-exporter/bin/gpu-exporter --version")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("gpu-exporter: found no Python 3.10 or newer in /usr/bin:/usr/local/bin:")
    assert "dnf install python3.11" in done.stderr and done.stderr.count("\n") == 1
    chroot.run("mv /root/python3.13 /usr/local/bin/python3.11")  # as the message says
    assert chroot.run("/opt/gpu-exporter/bin/gpu-exporter --version") == f"gpu-exporter {VERSION}\n"


def test_another_kind_of_machine_is_named(built: dict[str, Path], enter: Callable[..., Chroot]) -> None:
    chroot = enter(TRIXIE)
    chroot.run(
        f"tar -xzf {built['now']}/*-node.tar.gz -C /opt; rm -r /opt/gpu-exporter/lib/*_64", folders=[built["now"]]
    )
    done = chroot.attempt("/opt/gpu-exporter/bin/gpu-exporter --version")
    assert done.returncode == 1 and "has no modules for " in done.stderr and "Traceback" not in done.stderr


def test_the_box_for_a_trial_and_the_wheelhouse_work_on_debian(
    enter: Callable[..., Chroot], nvml: Driver, tmp_path: Path
) -> None:
    """The index of the host is used."""
    chroot = enter(BOOKWORM)
    environment, places = nvml
    clone = checkout(tmp_path / "clone")
    certificates = Path("/etc/ssl/certs")
    names = {"PIP_CERT": str(certificates / "ca-certificates.crt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    script = f"cd {clone}\n{box('apt-get install -y python3-venv')}"
    chroot.run(script, names, [clone, certificates])
    assert GPU in chroot.run("gpu-exporter --once --no-attribution.slurm", environment, places)
    chroot.run(box("files=$(gpu-exporter contrib)") + box("$files/systemd/gpu-exporter.service"))
    assert chroot.run(START, environment, places) == ""
    assert "serving on" in chroot.run("cat /started")
    make, *install = box("--wheel-dir wheelhouse").splitlines()
    chroot.run(f"rm -r /opt/gpu-exporter; cd {clone}; {make}", names, [clone, certificates])
    alone = "export PIP_INDEX_URL=http://127.0.0.1:9/\n"
    chroot.run(f"{alone}cd {clone}\n" + "\n".join(install), folders=[clone])
    assert GPU in chroot.run("gpu-exporter --once --no-attribution.slurm", environment, places)
    shutil.rmtree(clone)
