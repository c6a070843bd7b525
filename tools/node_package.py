"""Packages for nodes without Kubernetes, e.g. of Slurm: `make packages` writes them and SHA256SUMS into out/packages.

    gpu-exporter-VERSION-node.tar.gz    the folder gpu-exporter, for /opt
    gpu-exporter_VERSION_all.deb        the same folder, units, /etc/gpu-exporter, and /usr/bin/gpu-exporter
    gpu-exporter-VERSION-1.noarch.rpm   the same; only if rpmbuild is installed

All have the files that git tracks and the dependencies of the agent's image (exporter/locks/agent.txt). They run with
each Python from 3.10 on, on x86_64 and aarch64: compiled modules are of the stable ABI, and PyYAML is without its own.
The same commit gives the same bytes. Only the download of the dependencies needs the network.

`make packages INTERPRETER=1` adds the same three with a Python (tools/interpreter.py) for nodes whose own is too old.
They are for one kind of machine, which their names have.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.version import VERSION
from tools import interpreter
from tools.files import ROOT
from tools.interpreter import GLIBC_MAX

OUT = ROOT / "out" / "packages"
PARTS = ROOT / "tools" / "node"
LOCK = ROOT / "exporter" / "locks" / "agent.txt"
SOURCE = "exporter/gpu_exporter"
PREFIX = "opt/gpu-exporter"
MACHINES = ("x86_64", "aarch64")
SUMMARY = "The holder of each GPU, its use, and the cause of low use, for Prometheus"
URL = "https://github.com/gpu-exporter/gpu-exporter"
LICENSES = "Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause AND MIT"  # of gpu-exporter and of the packages in its folder
INTERPRETER_LICENSES = " AND Python-2.0.1 AND Zlib"  # of CPython and zlib; those of OpenSSL and libffi are above
DEBIAN_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# RHEL 8 and 9 have these beside their own python3, which is too old.
RPM_PYTHON = "(python3 >= 3.10 or python3.11 or python3.12 or python3.13 or python3.14)"
CONFIGURATION = {"config.yaml": 0o644, "environment": 0o600}  # a variable may contain the collector's password
SCRIPTS = {
    "postinst": 'if [ "$1" = configure ]; then after_install; fi',
    "prerm": 'if [ "$1" = remove ]; then before_removal; fi',
    "postrm": """case $1 in
remove) after_removal ;;
purge)
    remove_state
    rm -rf /etc/gpu-exporter
    ;;
esac""",
}
SPEC = """Name: gpu-exporter
Version: {version}
Release: 1
Summary: {summary}
License: {licenses}
URL: {url}
BuildArch: {machine}
AutoReqProv: no
Requires: /bin/sh
Requires: {needed}
%define _buildhost localhost
%define use_source_date_epoch_as_buildtime 1
%define clamp_mtime_to_source_date_epoch 1
%define _binary_payload w9.gzdio
%define _binaries_in_noarch_packages_terminate_build 0
%define _build_id_links none
%define debug_package %{{nil}}
%define __os_install_post %{{nil}}

%description
{summary}.

%install
cp -a {stage}/. %{{buildroot}}

%files
%defattr(-,root,root)
/{prefix}
/usr/bin/gpu-exporter
/usr/lib/systemd/system/*
%dir /etc/gpu-exporter
{configuration}

%post
{shared}
after_install

%preun
{shared}
if [ "$1" = 0 ]; then before_removal; fi

%postun
{shared}
if [ "$1" = 0 ]; then
    after_removal
    remove_state
fi
"""


class PackageError(Exception):
    """A package cannot be built. The text names the wrong part."""


class Edition(NamedTuple):
    """The properties of an edition: packages for every Python, or packages that contain an interpreter."""

    machines: tuple[str, ...]
    interpreter: Path | None
    archive: str  # the end of its name
    deb_machine: str
    rpm_machine: str
    deb_needs: str
    rpm_needs: str
    licenses: str


ANY_PYTHON = Edition(MACHINES, None, "", "all", "noarch", "python3 (>= 3.10)", RPM_PYTHON, LICENSES)


def with_interpreter(folder: Path) -> Edition:
    """Returns the edition for this host's machine that contains the interpreter in `folder`."""
    machine = os.uname().machine
    needs = f"libc6 (>= 2.{GLIBC_MAX})", f"libc.so.6(GLIBC_2.{GLIBC_MAX})(64bit)"
    names = f"-{machine}", DEBIAN_MACHINES[machine], machine
    return Edition((machine,), folder, *names, *needs, LICENSES + INTERPRETER_LICENSES)


def run(*command: str | Path, **environment: str) -> str:
    """Returns the output of a command. Raises PackageError with the command's errors."""
    own = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackageError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def download(folder: Path, machine: str, python: str | Path) -> list[Path]:
    """Downloads the locked wheels for one machine into `folder`. `python`: a Python with pip."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(17, GLIBC_MAX + 1)]
    kinds = [f"--abi={abi}" for abi in ("cp310", "abi3", "none")]
    fetch = ["download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary=:all:"]
    of = ["--implementation=cp", "--python-version=3.10", *kinds, *platforms, "--dest", str(folder)]
    run(python, "-m", "pip", *fetch, *of, "-r", LOCK)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, lib: Path, machine: str) -> None:
    """Unpacks a wheel. A wheel with compiled modules of the stable ABI goes into the machine's folder, other wheels go
    into the common folder. Omits modules for a single version of Python. Raises PackageError if a module needs a newer
    glibc.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(("/", "/RECORD", "/WHEEL"))]
        stable = [name for name in names if name.endswith(".abi3.so")]
        for name in stable:
            newest = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", archive.read(name))), default=0)
            if newest > GLIBC_MAX:
                raise PackageError(f"{wheel.name}: {name} needs glibc 2.{newest}, at most 2.{GLIBC_MAX} is allowed")
        target = lib / machine if stable else lib
        for name in names:
            if (name.endswith(".so") and name not in stable) or name.startswith("_yaml/"):
                continue
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def fill_prefix(prefix: Path, wheels: Path, python: str | Path, edition: Edition) -> None:
    """Writes the folder gpu-exporter: launcher, package, dependencies, and the interpreter of the edition, if any."""
    lib = prefix / "lib"
    for name in filter(None, run("git", "ls-files", "-z", SOURCE).split("\0")):
        path = lib / Path(name).relative_to("exporter")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path)
    for machine in edition.machines:
        for wheel in download(wheels / machine, machine, python):
            unpack(wheel, lib, machine)
    (prefix / "bin").mkdir()
    for name, target in (("gpu-exporter", "bin"), ("python", "bin"), ("start.py", "lib")):
        shutil.copy(PARTS / name, prefix / target)
    shutil.copy(ROOT / "LICENSE", prefix)
    if edition.interpreter is not None:
        shutil.copytree(edition.interpreter, prefix / "python")
        (prefix / "bin" / "python").unlink()
        (prefix / "bin" / "python").symlink_to(f"../python/bin/python{interpreter.VERSION}")


def fill_stage(stage: Path, wheels: Path, python: str | Path, edition: Edition) -> None:
    """Writes the files that deb and rpm install."""
    fill_prefix(stage / PREFIX, wheels, python, edition)
    units = stage / "usr" / "lib" / "systemd" / "system"
    shutil.copytree(ROOT / SOURCE / "contrib" / "systemd", units)
    configuration = stage / "etc" / "gpu-exporter"
    configuration.mkdir(parents=True)
    for name in CONFIGURATION:
        shutil.copy(PARTS / name, configuration)
    (stage / "usr" / "bin").mkdir()
    (stage / "usr" / "bin" / "gpu-exporter").symlink_to(f"/{PREFIX}/bin/gpu-exporter")
    for path in stage.rglob("*"):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(
                CONFIGURATION.get(path.name, 0o644) if path.parent == configuration else 0o755 if executable else 0o644
            )


def members(root: Path, top: str) -> Iterator[tuple[str, Path]]:
    """Yields each path below `root` in a fixed order, with its name in an archive."""
    for path in sorted(root.rglob("*")):
        yield f"{top}{path.relative_to(root).as_posix()}", path


def tar(contents: Iterator[tuple[str, Path]], date: int) -> bytes:
    """Returns a tar.gz of the files in `root`. All files have the same date (Unix seconds)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, path in contents:
            entry = archive.gettarinfo(path, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = date
            with path.open("rb") if entry.isfile() else io.BytesIO() as content:
                archive.addfile(entry, content)
    return gzip.compress(buffer.getvalue(), mtime=0)


def build_deb(stage: Path, date: int, path: Path, edition: Edition) -> None:
    """Writes the Debian package: an ar archive with three members (deb(5))."""
    files = [each for _, each in members(stage, "") if each.is_file() and not each.is_symlink()]
    control = {
        "control": f"""Package: gpu-exporter
Version: {VERSION}
Architecture: {edition.deb_machine}
Maintainer: gpu-exporter <{URL}>
Installed-Size: {sum(each.stat().st_size for each in files) // 1024}
Depends: {edition.deb_needs}
Section: admin
Priority: optional
Homepage: {URL}
Description: {SUMMARY}
""",
        "conffiles": "".join(f"/etc/gpu-exporter/{name}\n" for name in CONFIGURATION),
        "md5sums": "".join(f"{digest(each, 'md5')}  {each.relative_to(stage)}\n" for each in files),
    }
    shared = (PARTS / "scripts.sh").read_text("utf-8")
    control |= {name: f"#!/bin/sh\nset -e\n{shared}\n{calls}\n" for name, calls in SCRIPTS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in control.items():
            file = Path(scratch, name)
            file.write_text(text, "utf-8")
            file.chmod(0o755 if name in SCRIPTS else 0o644)
        parts = {
            "debian-binary": b"2.0\n",
            "control.tar.gz": tar(members(Path(scratch), "./"), date),
            "data.tar.gz": tar(members(stage, "./"), date),
        }
    with path.open("wb") as archive:
        archive.write(b"!<arch>\n")
        for name, content in parts.items():
            archive.write(f"{name:<16}{date:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode("ascii"))
            archive.write(content + b"\n" * (len(content) % 2))


def build_rpm(stage: Path, date: int, out: Path, rpmbuild: str, edition: Edition) -> None:
    """Writes the package for RHEL and similar systems."""
    lines = [
        f"%config(noreplace) %attr({mode:04o},root,root) /etc/gpu-exporter/{name}"
        for name, mode in CONFIGURATION.items()
    ]
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch, "gpu-exporter.spec")
        text = SPEC.format(
            version=VERSION,
            summary=SUMMARY,
            licenses=edition.licenses,
            url=URL,
            machine=edition.rpm_machine,
            needed=edition.rpm_needs,
            stage=stage,
            prefix=PREFIX,
            configuration="\n".join(lines),
            shared=(PARTS / "scripts.sh").read_text("utf-8"),
        )
        spec.write_text(text, "utf-8")
        folders = [f"_topdir {scratch}", f"_rpmdir {out}", "_build_name_fmt %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm"]
        run(rpmbuild, "-bb", "--quiet", *(f"--define={each}" for each in folders), spec, SOURCE_DATE_EPOCH=str(date))


def digest(path: Path, kind: str = "sha256") -> str:
    """Returns the digest of a file in hexadecimal digits."""
    return hashlib.new(kind, path.read_bytes(), usedforsecurity=False).hexdigest()


def build_edition(out: Path, python: str | Path, edition: Edition) -> list[Path]:
    """Writes the packages of one edition into `out`; the rpm only if rpmbuild is on PATH. Returns their paths."""
    date = int(run("git", "log", "-1", "--format=%ct"))
    archive = out / f"gpu-exporter-{VERSION}-node{edition.archive}.tar.gz"
    deb = out / f"gpu-exporter_{VERSION}_{edition.deb_machine}.deb"
    rpm = out / f"gpu-exporter-{VERSION}-1.{edition.rpm_machine}.rpm"
    rpmbuild = shutil.which("rpmbuild")
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch, "stage")
        fill_stage(stage, Path(scratch, "wheels"), python, edition)
        archive.write_bytes(tar(members(stage / "opt", ""), date))
        build_deb(stage, date, deb, edition)
        if rpmbuild is not None:
            build_rpm(stage, date, out, rpmbuild, edition)
    return [rpm, archive, deb] if rpmbuild is not None else [archive, deb]


def build(out: Path, python: str | Path = sys.executable, own: Path | None = None) -> list[str]:
    """Writes all packages into `out`. `python`: a Python with pip. `own`: folder of an interpreter; packages that
    contain it are built too. Returns a line about each package. Raises PackageError.
    """
    out.mkdir(parents=True, exist_ok=True)
    editions = [ANY_PYTHON, *([with_interpreter(own)] if own is not None else [])]
    paths = [path for edition in editions for path in build_edition(out, python, edition)]
    (out / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in paths), "ascii")
    lines = [f"{path.name}: {path.stat().st_size:,} bytes" for path in paths]
    if shutil.which("rpmbuild") is None:
        lines.append("NO rpm, since rpmbuild is not on PATH (Debian: apt-get install rpm; RHEL: dnf install rpm-build)")
    return lines


def main(arguments: list[str]) -> int:
    """Builds the packages into out/packages, or into the given folder. --interpreter also builds the packages that
    contain an interpreter. Returns the exit code.
    """
    folders = [Path(each).resolve() for each in arguments if each != "--interpreter"]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            own = Path(scratch, "interpreter") if "--interpreter" in arguments else None
            lines = interpreter.build(own) if own is not None else []
            print(*lines, *build(folders[0] if folders else OUT, own=own), sep="\n")
    except (PackageError, interpreter.InterpreterError) as exc:
        print(f"packages: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
