"""Container images without a registry: an image of one static program, and the project's images by its Dockerfile."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed.programs import fresh_entry

if TYPE_CHECKING:
    from tests.testbed.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("pause.c")
BASE = "localhost/python:bookworm"
BASE_PACKAGES = "python3-minimal,python3-venv,ca-certificates"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
PAUSE = "localhost/pause:1"


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_pause_image(path: Path) -> None:
    """Write the image PAUSE with the program pause.c; for the sandbox of pods and for the pods themselves."""
    program = path.with_suffix(".program")
    subprocess.run(["gcc", "-O2", "-static", "-o", str(program), str(SOURCE)], check=True)
    layer = _tar({"pause": (program.read_bytes(), 0o755)})
    program.unlink()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]).encode()
    path.write_bytes(
        _tar({"manifest.json": (manifest, 0o644), "config.json": (config, 0o644), "layer.tar": (layer, 0o644)})
    )


def base_archive() -> Path:
    """A root file system of Debian 12 with Python, built once into the cache (about 20 s)."""
    with fresh_entry("python-bookworm-1.tar") as (target, making):
        if making is not None:
            fresh = making / "root.tar"
            command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "--format=tar"]
            done = subprocess.run(
                [*command, "bookworm", str(fresh)], capture_output=True, text=True, check=False, timeout=600
            )
            assert done.returncode == 0, done.stderr[-2000:]
            fresh.rename(target)
    return target


class Builder:
    """Builds images with buildah inside a sandbox, so that storage and mounts end with it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._folder = sandbox.scratch / "images"
        self._folder.mkdir()

    def _run(self, *arguments: str | Path) -> None:
        storage = ("--root", self._folder / "storage", "--runroot", "/run/buildah", "--storage-driver", "overlay")
        self._sandbox.run("buildah", *storage, *arguments, timeout_s=600)

    def _bud(self, tag: str, context: Path, *options: str | Path) -> None:
        self._run("bud", "--isolation", "chroot", "--network", "host", "--pull-never", "-t", tag, *options, context)

    def build_base(self) -> None:
        """Build the image that replaces python:slim."""
        context = self._folder / "base"
        context.mkdir()
        (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        shutil.copy(base_archive(), context / "rootfs.tar")
        self._bud(BASE, context)

    def build_target(self, target: str, tag: str) -> Path:
        """Build one target of the project's Dockerfile; returns its archive. pip uses the machine's CA and index."""
        options: list[str | Path] = ["--target", target, "--build-arg", f"BASE={BASE}", "-f", ROOT / "Dockerfile"]
        if CA_BUNDLE.exists():
            options += ["-v", f"{CA_BUNDLE}:{CA_BUNDLE}:ro", "--build-arg", f"PIP_CERT={CA_BUNDLE}"]
        if index := os.environ.get("PIP_INDEX_URL"):
            options += ["--build-arg", f"PIP_INDEX_URL={index}"]
        self._bud(tag, ROOT, *options)
        archive = self._folder / f"{target}.tar"
        self._run("push", tag, f"docker-archive:{archive}:{tag}")
        return archive
