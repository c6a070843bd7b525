"""Packages with an interpreter (`make packages INTERPRETER=1`) on systems that have no Python at all."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.component.package_host import GPU, START, Driver, check_use_and_upgrade, compiled, make_driver
from tests.testbed.chroots import Chroot, debian_root
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.programs import fresh_entry
from tests.testbed.servers import require
from tests.testbed.written import ROOT, code_block
from tools import interpreter, node_package

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "slurm.md"
BARE = ("packages-bare-1", "bookworm", ("systemd", "procps", "rpm"))  # no package of it needs a Python
# Of glibc, and libgcc_s, which each system has beside it.
LIBRARIES = "libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libgcc_s.so.1"
# Modules that gpu-exporter imports and CPython builds only if it finds what they need.
MODULES = (
    "ssl, ctypes, zlib, hashlib, socket, asyncio, resource, fcntl, unicodedata, uuid, smtplib, psutil, bcrypt, yaml"
)


@pytest.fixture(scope="module")
def own() -> Path:
    """The interpreter, built once into the cache: minutes."""
    require("mmdebstrap", "rpmbuild")
    parts = (Path(interpreter.__file__), interpreter.COMPILER)
    key = hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:16]
    with fresh_entry(f"interpreter-{key}") as (target, making):
        if making is not None:
            interpreter.build(making / "interpreter")
            (making / "interpreter").rename(target)
    return target


@pytest.fixture(scope="module")
def built(own: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All packages of this version, and those with the interpreter of the next."""
    folder = tmp_path_factory.mktemp("packages")
    lines = node_package.build(folder / "now", own=own)
    assert len(lines) == 6, lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_package, "VERSION", "99.0")
        (folder / "next").mkdir()
        node_package.build_edition(folder / "next", sys.executable, node_package.with_interpreter(own))
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def chroot(tmp_path: Path) -> Chroot:
    bare = Chroot(debian_root(*BARE), tmp_path / "chroot")
    assert bare.run("find / -xdev -name 'python3*' -o -name 'libpython*'") == ""
    return bare


@pytest.fixture
def nvml(nvml_directory: Path, nvml_table: NvmlTable) -> Driver:
    return make_driver(nvml_directory, nvml_table)


def box(text: str) -> str:
    """The only block of docs/slurm.md with this text. No systemd runs in a chroot: START starts the unit."""
    return code_block(PAGE, text).replace("systemctl enable --now", "systemctl enable")


def machine_code(archive: Path, folder: Path) -> Iterator[Path]:
    """Every ELF file of an archive, unpacked into a folder."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="tar")
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.read_bytes().startswith(b"\x7fELF"):
            yield path


def test_the_checksums_are_of_all_packages(built: dict[str, Path]) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built["now"], capture_output=True)
    assert (done.returncode, done.stdout.count(b": OK")) == (0, 6)


def test_all_machine_code_needs_only_glibc_2_28(built: dict[str, Path], tmp_path: Path) -> None:
    """By readelf, in the archive, whose files deb and rpm have too."""
    (archive,) = built["now"].glob("*-node-*.tar.gz")
    names = set()
    for path in machine_code(archive, tmp_path):
        names.add(path.name)
        said = subprocess.run(["readelf", "-VdW", path], capture_output=True, text=True, check=True).stdout
        versions = {int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", said)}
        assert max(versions) <= 28, f"{path} needs glibc 2.{max(versions)}"
        assert "GLIBC_PRIVATE" not in said
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
        assert {each for each in needed if not each.startswith("ld-linux-")} <= set(LIBRARIES.split()), path
    assert names == {f"python{interpreter.VERSION}", "_psutil_linux.abi3.so", "_bcrypt.abi3.so"}


def test_the_archive_says_what_it_was_made_of_and_has_no_path_of_the_host(
    built: dict[str, Path], tmp_path: Path
) -> None:
    (archive,) = built["now"].glob("*-node-*.tar.gz")
    (program,) = (path for path in machine_code(archive, tmp_path) if path.name.startswith("python"))
    assert b"making-" not in program.read_bytes() and str(ROOT).encode() not in program.read_bytes()
    own = tmp_path / "gpu-exporter" / "python"
    assert re.fullmatch(
        r"zlib \S+\nlibffi \S+\nopenssl 3\.\S+\npython3\.13 3\.13\.\S+\n", (own / "SOURCES").read_text("ascii")
    )
    assert {path.name for path in (own / "licenses").iterdir()} == set(interpreter.SOURCES)
    assert not {"test", "idlelib", "ensurepip"} & {path.name for path in own.rglob("*")}


def test_what_rpm_and_deb_need_is_in_rhel_8_and_9(built: dict[str, Path], chroot: Chroot) -> None:
    show = f"cd {built['now']} && rpm -qpR *x86_64.rpm && dpkg-deb --field *amd64.deb Depends"
    needs = set(chroot.run(show, folders=[built["now"]]).splitlines())
    own = {need for need in needs if need.startswith("rpmlib(")}
    assert needs - own == {"/bin/sh", "libc.so.6(GLIBC_2.28)(64bit)", "libc6 (>= 2.28)"}
    # rpm 4.14 of RHEL 8 knows these, and not each compression.
    assert {re.sub(r".*\((\w+)\).*", r"\1", need) for need in own} == {
        "CompressedFileNames", "FileDigests", "PayloadFilesHavePrefix",
    }  # fmt: skip


def check_life(chroot: Chroot, nvml: Driver, now: Path, install: str, following: Path, upgrade: str) -> None:
    """What deb and rpm have in common: nothing else is installed, also not a Python."""
    environment, places = nvml
    out = chroot.run(f"cd {now}\n{install}", environment, [*places, now])
    assert out.count("H100") == 2 and "no source of holders is configured" in out  # no Slurm is here
    assert GPU in chroot.run("gpu-exporter --once --no-attribution.slurm", environment, places)
    check_use_and_upgrade(chroot, nvml, upgrade, [following])
    # A module that nothing imports: all were compiled at the installation.
    assert any(re.search(r"/python/lib/.*/mailbox\.cpython-\d+\.pyc$", path) for path in compiled(chroot))


def test_the_deb_is_installed_used_upgraded_and_removed_without_a_python(
    built: dict[str, Path], chroot: Chroot, nvml: Driver
) -> None:
    now, following = built["now"], built["next"]
    chroot.run("touch /started", nvml[0], [*nvml[1], now, following])
    before = chroot.files()
    lines = (
        box("gpu-exporter_*_all.deb").replace("_all.deb", "_amd64.deb").replace("apt-get install -y", "dpkg --install")
    )
    check_life(chroot, nvml, now, lines, following, f"dpkg --install {following}/*_amd64.deb")
    chroot.run("dpkg --purge gpu-exporter")
    assert chroot.files() ^ before <= {"/opt"}  # dpkg removes an empty folder that a package has


def test_the_rpm_is_installed_used_upgraded_and_removed_without_a_python(
    built: dict[str, Path], chroot: Chroot, nvml: Driver
) -> None:
    """By rpm itself in place of dnf; Debian's has no record of its glibc."""
    now, following = built["now"], built["next"]
    chroot.run("touch /started", nvml[0], [*nvml[1], now, following])
    before = chroot.files()
    lines = box("./gpu-exporter-*.x86_64.rpm").replace("dnf install -y", "rpm --install --nodeps")
    check_life(chroot, nvml, now, lines, following, f"rpm --upgrade --nodeps {following}/*.x86_64.rpm")
    chroot.run("rpm --erase gpu-exporter")
    assert chroot.files() ^ before <= {"/opt", "/etc/gpu-exporter", "/etc/gpu-exporter/config.yaml.rpmsave"}


def test_the_archive_runs_from_its_folder_and_takes_no_modules_from_others(
    built: dict[str, Path], chroot: Chroot, nvml: Driver
) -> None:
    environment, places = nvml
    lines = box("-node.tar.gz -C /opt").replace("-node.tar.gz", "-node-x86_64.tar.gz")
    chroot.run(f"cd {built['now']}\n{lines}", folders=[built["now"]])
    assert GPU in chroot.run("gpu-exporter --once --no-attribution.slurm", environment, places)
    assert chroot.run(START, environment, places) == ""
    chroot.run("mkdir -p /elsewhere; mv /opt/gpu-exporter /elsewhere/here")
    lib = "/elsewhere/here/lib"
    script = f"import sys; sys.path[:0] = ['{lib}', '{lib}/x86_64']; import {MODULES}; print(sys.prefix, *sys.path)"
    out = chroot.run(f'PYTHONPATH=/tmp PYTHONHOME=/tmp /elsewhere/here/bin/python -I -c "{script}"')
    assert all(path.startswith("/elsewhere/here/") for path in out.split()), out
