"""What a base image contains, from its root file system."""

from __future__ import annotations

import io
import tarfile

import pytest
from tools.base_sbom import SbomError, describe, licences

STATUS = """\
Package: libgcc-s1
Status: install ok installed
Architecture: arm64
Version: 12.2.0-14+deb12u1
Depends: gcc-12-base (= 12.2.0-14+deb12u1),
 libc6 (>= 2.35)
Description: GCC support library
 Version: of the support library

Package: removed
Status: deinstall ok config-files
Architecture: arm64
Version: 1

Package: zlib1g
Status: install ok installed
Architecture: arm64
Version: 1:1.2.13.dfsg-1
"""
ZLIB = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: Zlib\n"
GCC = "GCC is free software. See\n/usr/share/common-licenses/GPL-3.\nLicense: prose that only looks like a field\n"


def tree(files: dict[str, str], links: dict[str, str]) -> io.BytesIO:
    """A root file system as `docker export` writes it; the links come first."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    buffer.seek(0)
    return buffer


FILES = {
    "./var/lib/dpkg/status": STATUS,
    "usr/share/doc/gcc-12-base/copyright": GCC,
    "usr/share/doc/zlib1g/copyright": ZLIB,
    "usr/local/lib/python3.13/LICENSE.txt": "PSF",
    "usr/local/include/python3.13/patchlevel.h": '#define PY_VERSION             "3.13.9"\n',
    "usr/local/lib/python3.13/site-packages/pip-26.1.dist-info/METADATA": (
        "Metadata-Version: 2.4\nName: pip\nVersion: 26.1\nLicense-Expression: MIT\n\npip\nVersion: of the text\n"
    ),
    "opt/gpu-exporter/lib/python3.13/site-packages/psutil-7.2.dist-info/METADATA": "Name: psutil\nVersion: 7.2\n",
    "etc/passwd": "root",
}
LINKS = {"usr/share/doc/libgcc-s1": "gcc-12-base"}  # as Debian does for packages of one source


def test_packages_and_interpreter_with_their_licences() -> None:
    found = describe(tree(FILES, LINKS), "agent", "0.1.0")
    assert found["metadata"]["component"] == {"type": "container", "name": "agent", "version": "0.1.0"}
    listed = {
        each["bom-ref"]: [next(iter(licence["license"].values())) for licence in each["licenses"]]
        for each in found["components"]
    }
    assert listed == {
        "pkg:deb/debian/libgcc-s1@12.2.0-14%2Bdeb12u1?arch=arm64": ["GPL-3"],
        "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=arm64": ["Zlib"],
        "pkg:pypi/pip@26.1": ["MIT"],
        "pkg:generic/python@3.13.9": ["PSF-2.0"],
    }


def test_a_package_without_a_copyright_file_is_an_error() -> None:
    with pytest.raises(SbomError, match="libgcc-s1 has no /usr/share/doc/libgcc-s1/copyright"):
        describe(tree(FILES, {}), "agent", "0.1.0")


def test_a_base_that_is_not_debian_s_is_an_error() -> None:
    with pytest.raises(SbomError, match="not Debian's"):
        describe(tree({"etc/alpine-release": "3.22"}, {}), "agent", "0.1.0")


def test_something_else_than_a_tar_is_an_error() -> None:
    with pytest.raises(SbomError, match="not a tar of a root file system"):
        describe(io.BytesIO(b"Error response from daemon: no such container\n" * 40), "agent", "0.1.0")


def test_links_that_lead_in_a_circle_end() -> None:
    circle = {"usr/share/doc/libgcc-s1": "other", "usr/share/doc/other": "libgcc-s1"}
    with pytest.raises(SbomError, match="libgcc-s1"):
        describe(tree(FILES, circle), "agent", "0.1.0")


def test_licences_of_a_file_whose_first_field_is_not_its_format() -> None:
    assert licences(f"Source: https://example.org\n{ZLIB}") == ["Zlib"]


def test_a_file_that_names_no_licence_has_none() -> None:
    assert licences("All rights are as the authors say.\n") == []
