"""Container images without a registry: a docker-archive around one static program."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

SOURCE = Path(__file__).with_name("pause.c")
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
    """An image PAUSE whose program is pause.c; for the sandbox of pods and for the pods themselves."""
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
