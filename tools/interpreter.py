"""Builds a Python for nodes whose own Python is too old, such as Rocky 8 and 9: CPython from Debian's sources, for
glibc 2.28 or newer.

The program contains OpenSSL, libffi, zlib, and the C modules of the standard library. The Python modules are beside it.
It has no curses, sqlite3, bz2, lzma, readline, tkinter, or tests. Debian signs the sources and maintains their security
fixes. The compiler is pinned by its hash. The same sources give the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.files import ROOT

SUITE = "trixie"  # of Debian: 13, which gets security fixes until 2030
SOURCES = ("zlib", "libffi", "openssl", "python3.13")
VERSION = "3.13"
GLIBC_MAX = 28  # 2.28 is that of RHEL 8
PREFIX = "/opt/gpu-exporter/python"  # only a default: the program finds its library beside itself
COMPILER = ROOT / "tools" / "node" / "ziglang.txt"
NEEDED = {"mmdebstrap": "mmdebstrap", "dpkg-source": "dpkg-dev"}  # Debian's package; dpkg-dev needs make, perl and xz
DATE = "1700000000"  # __DATE__ in what is compiled; any constant
# Runs with apt's configuration for SUITE. A mirror may lack the newest version for some hours.
LACKING = "not on the mirror, so an older version is used"
FETCH = f"""
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
for name in {" ".join(SOURCES)}; do
    for version in $(apt-cache showsrc --only-source "$name" | sed -n 's/^Version: //p' | sort -rVu); do
        apt-get source --quiet=2 "$name=$version" >&2 && continue 2
        echo "{LACKING}: $name $version" >&2
    done
    exit 1
done
"""
# What TLS with Python needs. The rest would double the time that it takes.
WITHOUT = (
    "shared tests apps docs legacy engine module dso async comp cmp cms ct dtls quic gost srp ts sctp ssl-trace rfc3779"
    " idea seed camellia aria bf cast rc2 rc4 rc5 md4 mdc2 whirlpool rmd160 sm2 sm3 sm4 siphash ec2m uplink afalgeng"
)
# libffi's configure is not in its sources, and autoconf, which writes it, is often missing. glibc and clang have these.
FFI_CONFIG = """#define EH_FRAME_FLAGS "a"
#define FFI_EXEC_STATIC_TRAMP 1
#define HAVE_ALLOCA_H 1
#define HAVE_AS_X86_64_UNWIND_SECTION_TYPE 1
#define HAVE_AS_X86_PCREL 1
#define HAVE_HIDDEN_VISIBILITY_ATTRIBUTE 1
#define HAVE_LONG_DOUBLE 1
#define HAVE_MEMCPY 1
#define HAVE_MEMFD_CREATE 1
#define HAVE_RO_EH_FRAME 1
#define SIZEOF_DOUBLE 8
#define SIZEOF_LONG_DOUBLE 16
#define SIZEOF_SIZE_T 8
#define STDC_HEADERS 1
#ifdef LIBFFI_ASM
#define FFI_HIDDEN(name) .hidden name
#else
#define FFI_HIDDEN __attribute__((visibility("hidden")))
#endif
"""
FFI_PARTS = "prep_cif.c types.c raw_api.c java_raw_api.c closures.c tramp.c"
# By the machine of the host and of the nodes: OpenSSL's name for it; libffi's target, its folder and sources there.
MACHINES = {
    "x86_64": ("linux-x86_64", "X86_64", "x86", "ffi64.c unix64.S ffiw64.c win64.S"),
    "aarch64": ("linux-aarch64", "AARCH64", "aarch64", "ffi.c sysv.S"),
}
UNUSED_MODULES = (
    "_bz2 _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _curses _curses_panel _dbm _gdbm"
    " _interpchannels _interpqueues _interpreters _lsprof _lzma _multibytecodec _sqlite3 _tkinter _uuid readline"
)
UNUSED_NAMES = ("__pycache__", "ensurepip", "idlelib", "pydoc_data", "test", "tests", "tkinter", "turtle*")
LICENSES = {"zlib": "LICENSE", "libffi": "LICENSE", "openssl": "LICENSE.txt", "python3.13": "LICENSE"}


class InterpreterError(Exception):
    """The interpreter cannot be built. The text names the step and its error."""


def fetch(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Downloads the sources from Debian, checks their signature, and unpacks them with Debian's security fixes. Returns
    the folder of each source, and a line about each version that the mirror lacks. Raises InterpreterError.
    """
    folder.mkdir()
    hooks = {
        "setup": """sed -i 's/^deb /deb-src /' "$1/etc/apt/sources.list\"""",
        "customize": f"cd {folder}\n{FETCH}",
    }
    options = ["--quiet", "--mode=chrootless", "--variant=custom", *(f"--{n}-hook={s}" for n, s in hooks.items())]
    with tempfile.TemporaryDirectory() as root:
        said = run(["mmdebstrap", *options, SUITE, Path(root, "root")], folder)
    folders = {name: next(path for path in folder.glob(f"{name}-*") if path.is_dir()) for name in SOURCES}
    return folders, [line for line in said.splitlines() if line.startswith(LACKING)]


def run(command: Sequence[str | Path], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Runs a command in a folder. `environment`: replaces the whole environment. Returns its output. Raises
    InterpreterError with the end of the output.
    """
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said: str = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise InterpreterError(f"{' '.join(words[:3])} in {folder.name}: {said[-3000:]}")
    return said


class _Builder:
    """Builds for one machine in `folder`. Installs headers, and static libraries, into `folder/built`."""

    def __init__(self, folder: Path, machine: str, python: str | Path) -> None:
        self._machine = machine
        self.built = folder / "built"
        for name in ("bin", "built/lib", "built/include"):
            (folder / name).mkdir(parents=True)
        options = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary=:all:"]
        run([python, "-m", "pip", "install", *options, f"--target={folder / 'zig'}", "-r", COMPILER], folder)
        zig = folder / "zig" / "ziglang" / "zig"
        flags = f"-target {machine}-linux-gnu.2.{GLIBC_MAX} -fvisibility=hidden -g0 -Wno-date-time -fno-sanitize=all"
        # Called by name, so that no path of this host gets into the result.
        for name, part in {"cc": f"cc {flags}", "ar": "ar", "ranlib": "ranlib"}.items():
            script = folder / "bin" / f"zig-{name}"
            script.write_text(f'#!/bin/sh\nexec "{zig}" {part} "$@"\n', "utf-8")
            script.chmod(0o755)
        self._environment = {  # nothing of the caller, which may be make
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CC": "zig-cc",
            "AR": "zig-ar",
            "RANLIB": "zig-ranlib",
            "SOURCE_DATE_EPOCH": DATE,
            "LC_ALL": "C",
            "ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"),
            "ZIG_LOCAL_CACHE_DIR": str(folder / "cache"),
        }

    def _run(self, source: Path, *command: str | Path, **environment: str) -> None:
        run(command, source, {**self._environment, **environment})

    def _make(self, source: Path, *targets: str) -> None:
        self._run(source, "make", "--silent", f"-j{os.cpu_count() or 1}", *targets)

    def _keep(self, *libraries: Path, headers: list[Path]) -> None:
        for path in libraries:
            shutil.copy(path, self.built / "lib")
        for path in headers:
            shutil.copy(path, self.built / "include")

    def zlib(self, source: Path) -> None:
        self._run(source, "./configure", "--static", CFLAGS="-O2 -fPIC")
        self._make(source, "libz.a")
        self._keep(source / "libz.a", headers=[source / "zlib.h", source / "zconf.h"])

    def libffi(self, source: Path) -> None:
        _, target, place, parts = MACHINES[self._machine]
        version = source.name.partition("-")[2]
        major, minor, patch = (int(each) for each in version.split("."))
        values = {
            "VERSION": version,
            "FFI_VERSION_STRING": version,
            "FFI_VERSION_NUMBER": str(major * 10000 + minor * 100 + patch),
            "TARGET": target,
            "HAVE_LONG_DOUBLE": "1",
            "HAVE_LONG_DOUBLE_VARIANT": "0",
            "FFI_EXEC_TRAMPOLINE_TABLE": "0",
        }
        header = source / "include" / "ffi.h"
        text = header.with_suffix(".h.in").read_text("utf-8")
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        header.write_text(text, "utf-8")
        (source / "include" / "fficonfig.h").write_text(FFI_CONFIG, "ascii")
        machine_header = source / "src" / place / "ffitarget.h"
        flags = ["-w", "-O2", "-fPIC", "-DHAVE_CONFIG_H", "-Iinclude", "-Isrc", "-I.", f"-Isrc/{place}"]
        files = [*(f"src/{name}" for name in FFI_PARTS.split()), *(f"src/{place}/{name}" for name in parts.split())]
        for name in files:
            self._run(source, "zig-cc", *flags, "-c", name, "-o", f"{name}.o")
        self._run(source, "zig-ar", "rcs", "libffi.a", *(f"{name}.o" for name in files))
        self._keep(source / "libffi.a", headers=[header, machine_header])

    def openssl(self, source: Path) -> None:
        target = MACHINES[self._machine][0]
        options = [f"no-{name}" for name in WITHOUT.split()]
        places = ["--prefix=/opt/gpu-exporter", "--libdir=lib", "--openssldir=/etc/pki/tls"]  # as RHEL has it
        self._run(source, "perl", "./Configure", target, *places, *options)
        self._make(source, "build_libs")
        self._keep(source / "libssl.a", source / "libcrypto.a", headers=[])
        shutil.copytree(source / "include" / "openssl", self.built / "include" / "openssl")

    def python(self, source: Path) -> None:
        (source / "Modules" / "Setup.local").write_text(f"*disabled*\n{UNUSED_MODULES}\n", "ascii")
        own = {"MODULE_BUILDTYPE": "static", "OPT": "-DNDEBUG -O2"}
        for name, library in (("LIBFFI", "ffi"), ("ZLIB", "z")):
            own[f"{name}_CFLAGS"] = f"-I{self.built}/include"
            own[f"{name}_LIBS"] = f"-L{self.built}/lib -l{library}"
        options = ["--with-pkg-config=no", "--without-ensurepip", "--without-doc-strings", "--disable-test-modules"]
        self._run(source, "./configure", f"--prefix={PREFIX}", f"--with-openssl={self.built}", *options, **own)
        self._make(source, "python", "LDFLAGS=-s")


def fill(target: Path, sources: dict[str, Path]) -> None:
    """Writes the interpreter: bin, lib, licences, and the versions of the sources."""
    python = sources[f"python{VERSION}"]
    library = target / "lib" / f"python{VERSION}"
    shutil.copytree(python / "Lib", library, ignore=shutil.ignore_patterns(*UNUSED_NAMES))
    (library / "lib-dynload").mkdir()  # Python finds its prefix by it
    # How it was built is of use only for building modules, and names paths of this host.
    (library / f"_sysconfigdata__linux_{os.uname().machine}-linux-gnu.py").write_text("build_time_vars = {}\n", "ascii")
    (target / "bin").mkdir()
    shutil.copy(python / "python", target / "bin" / f"python{VERSION}")
    (target / "licenses").mkdir()
    for name, file in LICENSES.items():
        shutil.copy(sources[name] / file, target / "licenses" / name)
    # Debian's changelog begins: openssl (3.5.7-1~deb13u2) trixie-security; urgency=medium
    changes = [(path / "debian" / "changelog").read_text("utf-8").split(maxsplit=2) for path in sources.values()]
    (target / "SOURCES").write_text("".join(f"{name} {version.strip('()')}\n" for name, version, _ in changes), "ascii")


def build(target: Path, python: str | Path = sys.executable) -> list[str]:
    """Builds the interpreter for this host's machine. The folder `target` exists only after the build is complete.
    `python`: a Python with pip. Returns lines about the sources. Raises InterpreterError.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise InterpreterError(f"no interpreter can be built on {machine}, only on {' and '.join(MACHINES)}")
    missing = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    if missing:
        raise InterpreterError(f"this needs Debian or Ubuntu with apt-get install {' '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent) as scratch:
        folder = Path(scratch)
        sources, lacking = fetch(folder / "sources")
        builder = _Builder(folder, machine, python)
        for name, step in zip(SOURCES, (builder.zlib, builder.libffi, builder.openssl, builder.python), strict=True):
            step(sources[name])
        fill(folder / "done", sources)
        (folder / "done").rename(target)
    return [*lacking, *(f"interpreter: {line}" for line in (target / "SOURCES").read_text("ascii").splitlines())]
