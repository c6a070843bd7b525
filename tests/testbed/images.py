"""Container images without a registry: an image of one static program, and the project's images by its Dockerfile."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools import base_sbom

from tests.limits import advise
from tests.testbed.programs import fresh_entry

if TYPE_CHECKING:
    from tests.testbed.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("pause.c")
BASE = "localhost/python:bookworm"
BASE_PACKAGES = "python3-minimal,python3-venv,ca-certificates"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
PAUSE = "localhost/pause:1"
SIZE_MAX = {"agent": 15.0, "reconciler": 150.0}  # MB of an image's own layers, since each node pulls the agent


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

    def _run(self, *arguments: str | Path) -> str:
        storage = ("--root", self._folder / "storage", "--runroot", "/run/buildah", "--storage-driver", "overlay")
        return self._sandbox.run("buildah", *storage, *arguments, timeout_s=600)

    def _bud(self, tag: str, context: Path, *options: str | Path) -> None:
        self._run("bud", "--isolation", "chroot", "--network", "host", "--pull-never", "-t", tag, *options, context)

    def build_base(self) -> None:
        """Build the image that replaces python:slim."""
        context = self._folder / "base"
        context.mkdir()
        (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        shutil.copy(base_archive(), context / "rootfs.tar")
        self._bud(BASE, context)

    def build_target(self, target: str, tag: str, *more: str) -> Path:
        """Build one target of the project's Dockerfile; returns its archive. pip uses the machine's CA and index."""
        options: list[str | Path] = [
            "--target",
            target,
            "--build-arg",
            f"BASE={BASE}",
            "-f",
            ROOT / "Dockerfile",
            *more,
        ]
        if CA_BUNDLE.exists():
            options += ["-v", f"{CA_BUNDLE}:{CA_BUNDLE}:ro", "--build-arg", f"PIP_CERT={CA_BUNDLE}"]
        if index := os.environ.get("PIP_INDEX_URL"):
            options += ["--build-arg", f"PIP_INDEX_URL={index}"]
        self._bud(tag, ROOT, *options)
        archive = self._folder / f"{target}.tar"
        archive.unlink(missing_ok=True)  # buildah adds nothing to an archive
        self._run("push", tag, f"docker-archive:{archive}:{tag}")
        return archive

    def use(self, tag: str, *command: str | Path, files: Sequence[Path] = ()) -> str:
        """Run a command in a container of an image, with these files in /; returns its output."""
        container = self._run("from", "--pull-never", tag).strip()
        volumes = [word for file in files for word in ("--volume", f"{file}:/{file.name}:ro")]
        try:
            return self._run("run", "--isolation", "chroot", *volumes, container, "--", *command)
        finally:
            self._run("rm", container)


class Built(NamedTuple):
    """An image: bytes of its own layers, and their digests, without those of the base."""

    size: int
    digests: tuple[str, ...]


def describe(archive: Path) -> Built:
    """The own layers of an archive of `build_target`; the base is one layer."""
    with tarfile.open(archive) as tar:
        (about,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(tar.extractfile(about["Config"]))  # type: ignore[arg-type]
        own = about["Layers"][1:]
        return Built(sum(tar.getmember(name).size for name in own), tuple(config["rootfs"]["diff_ids"][1:]))


def build_release(folder: Path, version: str, date: str) -> list[str]:
    """Build both images twice as of `date` (seconds since 1970), use each, and write their archives to `folder`.

    Also writes the SBOM of their base. Returns a line about each image. Raises AssertionError if an image cannot be built or used, or if its two builds differ.
    """
    from tests.testbed.processes import Processes
    from tests.testbed.sandbox import Sandbox

    said = []
    with tempfile.TemporaryDirectory() as scratch, Processes(Path(scratch)) as processes:
        scenario = Path(scratch) / "scenario.json"
        scenario.write_text('{"gpus": [{"model": "H100"}, {"model": "H100"}]}', "utf-8")
        commands: dict[str, tuple[str | Path, ...]] = {
            "agent": ("--once", "--no-attribution.slurm", "--devices.scenario=/scenario.json"),
            "reconciler": ("reconcile", "--help"),
        }
        sandbox = Sandbox(processes)
        try:
            builder = Builder(sandbox)
            builder.build_base()
            with base_archive().open("rb") as archive:
                about = base_sbom.describe(archive, BASE, version)
            (folder / f"base-{version}.cdx.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
            for target, command in commands.items():
                tag = f"localhost/gpu-exporter/{target}:{version}"
                stamp = ("--timestamp", date, "--build-arg", f"VERSION={version}")
                first = describe(builder.build_target(target, tag, *stamp))
                built = builder.build_target(target, tag, *stamp, "--no-cache")
                again = describe(built)
                assert first.digests == again.digests, f"{target}: two builds of one commit differ"
                advise(f"MB of the own layers of {target}", again.size / 1e6, SIZE_MAX[target], so="install less")
                out = builder.use(tag, "gpu-exporter", *command, files=[scenario])
                assert "gpu_up{" in out or target != "agent", f"{target}: --once on a scenario prints no gpu_up"
                assert "--kubernetes.lease" in out or target != "reconciler", f"{target}: --help names no lease"
                shutil.copyfile(built, folder / f"gpu-exporter-{target}-{version}.image.tar")
                said.append(
                    f"{target}: {again.size / 1e6:.1f} MB in {len(again.digests)} layers of its own, "
                    f"the same in two builds; {' '.join(map(str, command))} prints {len(out.splitlines())} lines"
                )
        finally:
            sandbox.close()
    return said


if __name__ == "__main__":
    for line in build_release(Path(sys.argv[1]).resolve(), *sys.argv[2:]):
        print(line)
