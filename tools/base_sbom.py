"""Lists what the base of an image contains: Debian's packages, the Python interpreter and its packages, with licences.

    docker export CONTAINER | python -m tools.base_sbom NAME VERSION > FILE.cdx.json

Reads a root file system as tar from standard input and writes CycloneDX 1.6. The Python packages that the Dockerfile
installs, below /opt, are not in it: tools.release lists them. The licences of a Debian package
are those that its copyright file names (https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/). Older
files name only a file of /usr/share/common-licenses, or nothing: then the component refers to its copyright file.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
import tarfile
from collections.abc import Mapping
from typing import Any, BinaryIO
from urllib.parse import quote

STATUS = "var/lib/dpkg/status"
COPYRIGHT = re.compile(r"usr/share/doc/([^/]+)(?:/copyright)?")
INTERPRETER = re.compile(r"usr/local/lib/python(3\.\d+)/LICENSE\.txt")
METADATA = re.compile(r"usr/local/lib/python3\.\d+/site-packages/[^/]+\.dist-info/METADATA")
PATCHLEVEL = re.compile(r"usr/local/include/python3\.\d+/patchlevel\.h")
FILE_MAX = 16 * 1024**2  # bytes; the largest file that is read is dpkg's status, of some 100 KB


class SbomError(Exception):
    """The root file system has an unexpected content. The text names the missing or unexpected part."""


class Tree:
    """The files of a root file system that contain names of packages and licences."""

    def __init__(self, archive: BinaryIO) -> None:
        """Reads a tar. Raises SbomError if it is not a tar."""
        self._texts: dict[str, str] = {}
        self._links: dict[str, str] = {}
        try:
            with tarfile.open(fileobj=archive, mode="r|*") as tar:
                for entry in tar:
                    self._take(tar, entry)
        except tarfile.TarError as exc:
            raise SbomError(f"standard input is not a tar of a root file system: {exc}") from exc

    def _take(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        name = posixpath.normpath(entry.name.lstrip("/"))
        if name != STATUS and not any(each.fullmatch(name) for each in (COPYRIGHT, INTERPRETER, METADATA, PATCHLEVEL)):
            return
        if entry.issym():
            self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), entry.linkname)).lstrip("/")
        elif entry.islnk():
            self._links[name] = posixpath.normpath(entry.linkname.lstrip("/"))
        elif entry.isreg() and entry.size <= FILE_MAX and (file := tar.extractfile(entry)) is not None:
            self._texts[name] = file.read().decode("utf-8", "replace")

    def text(self, name: str) -> str | None:
        """Returns the text of a file, also if the file or its folder is a link. None if the file is missing."""
        for _ in range(8):
            if name in self._texts:
                return self._texts[name]
            folder, base = posixpath.split(name)
            if name in self._links:
                name = self._links[name]
            elif folder in self._links:
                name = f"{self._links[folder]}/{base}"
            else:
                return None
        return None

    def python_packages(self) -> list[tuple[str, str]]:
        """Returns path and text of the metadata of each Python package in the base, such as pip."""
        return sorted((name, text) for name, text in self._texts.items() if METADATA.fullmatch(name))

    def interpreter(self) -> tuple[str, str] | None:
        """Returns the version of a Python below /usr/local, and the name of its licence file. None without one."""
        for name in self._texts:
            if (found := INTERPRETER.fullmatch(name)) is not None:
                header = self.text(f"usr/local/include/python{found[1]}/patchlevel.h") or ""
                exact = re.search(r'#define PY_VERSION\s+"([^"]+)"', header)
                return (exact[1] if exact else found[1]), f"/{name}"
        return None


def packages(status: str) -> list[dict[str, str]]:
    """Returns the fields of each installed package in dpkg's status, without continuation lines."""
    found = []
    for paragraph in re.split(r"\n\s*\n", status.strip()):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Za-z-]+: ", line))
        if fields.get("Status", "").endswith(" installed"):
            found.append(fields)
    return found


def licences(text: str) -> list[str]:
    """Returns the sorted names of licences in a copyright file. Empty if it names none in a machine-readable form."""
    named: set[str] = set()
    if re.search(r"^Format(-Specification)?:", text.partition("\n\n")[0], re.M):  # otherwise such a line is prose
        named = {name.strip() for name in re.findall(r"^License:[ \t]*(\S.*)$", text, re.M)}
    return sorted(named or set(re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])", text)))


def component(fields: Mapping[str, str], tree: Tree) -> dict[str, Any]:
    """Converts a Debian package to a component of the SBOM. Raises SbomError if it has no copyright file."""
    name, version, machine = fields["Package"], fields["Version"], fields["Architecture"]
    path = f"usr/share/doc/{name}/copyright"
    text = tree.text(path)
    if text is None:
        raise SbomError(f"package {name} has no /{path}: its licence is not known")
    names = licences(text) or [f"see /{path}"]
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={machine}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "licenses": [{"license": {"name": each}} for each in names],
    }


def python_component(path: str, text: str) -> dict[str, Any]:
    """Converts a Python package to a component (https://packaging.python.org/en/latest/specifications/)."""
    fields = dict(re.findall(r"^(Name|Version|License-Expression|License): (.+)$", text.partition("\n\n")[0], re.M))
    name, version = fields.get("Name", ""), fields.get("Version", "")
    if not name or not version:
        raise SbomError(f"/{path} has no name or no version")
    purl = f"pkg:pypi/{quote(name.lower())}@{quote(version)}"
    licence = fields.get("License-Expression") or fields.get("License") or f"see /{path}"
    about = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return {**about, "licenses": [{"license": {"name": licence}}]}


def describe(archive: BinaryIO, name: str, version: str) -> dict[str, Any]:
    """Returns the SBOM of a root file system. Raises SbomError if it is not Debian's, or if a licence is unknown."""
    tree = Tree(archive)
    status = tree.text(STATUS)
    if status is None:
        raise SbomError(f"no /{STATUS}: the base image is not Debian's, so its packages are not known")
    components = sorted((component(each, tree) for each in packages(status)), key=lambda each: each["bom-ref"])
    components += [python_component(path, text) for path, text in tree.python_packages()]
    if (python := tree.interpreter()) is not None:
        exact, file = python
        components.append(
            {
                "type": "application",
                "bom-ref": f"pkg:generic/python@{exact}",
                "name": "python",
                "version": exact,
                "purl": f"pkg:generic/python@{exact}",
                "licenses": [{"license": {"id": "PSF-2.0"}}],
                "properties": [{"name": "file of the licence", "value": file}],
            }
        )
    about = {"component": {"type": "container", "name": name, "version": version}}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": about, "components": components}


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: docker export CONTAINER | python -m tools.base_sbom NAME VERSION", file=sys.stderr)
        return 2
    try:
        print(json.dumps(describe(sys.stdin.buffer, *arguments), indent=1))
    except SbomError as exc:
        print(f"base_sbom: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
