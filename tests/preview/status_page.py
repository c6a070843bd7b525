"""Draws the demo's status page and `gpu-exporter top` into out/: python -m tests.preview.status_page [--save]

Needs Debian's chromium. --save stores small pictures in docs/pictures.
"""

from __future__ import annotations

import html
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pyte

from tests.testbed.processes import GPU_EXPORTER, Processes, free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
PICTURES = {  # the size in pixels, and further flags
    "status-page-light": ("1300,800", ()),
    "status-page-dark": ("1500,800", DARK),
    "status-page-phone": ("500,1100", ()),  # headless Chromium has no smaller window
}
COLUMNS, LINES = 160, 16
TERMINAL = """<!doctype html><meta charset=utf-8><style>body {{ margin: 0; background: #0d1117; }}
pre {{ margin: 0; padding: 14px; color: #e6edf3; font: 14px/1.4 "DejaVu Sans Mono", "Liberation Mono", monospace; }}
b {{ color: #fff; }} i {{ font-style: normal; background: #e6edf3; color: #0d1117; }}</style><pre>{}</pre>"""


def shoot(url: str, picture: Path, size: str, flags: tuple[str, ...] = ()) -> None:
    """Draw a picture of a page."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *command,
                "--disable-background-networking",
                *flags,
                f"--window-size={size}",
                f"--user-data-dir={profile}",
                f"--screenshot={picture}",
                url,
            ],
            check=True,
            capture_output=True,
        )
    print(picture)


def read_top(address: str) -> str:
    """The screen of `top`, as HTML."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [*GPU_EXPORTER, "top", f"--from={address}"], stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    screen = pyte.Screen(COLUMNS, LINES)
    feed, until = pyte.ByteStream(screen), time.monotonic() + 4
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            feed.feed(os.read(ours, 65536))
    process.kill()
    process.wait()
    os.close(ours)
    first, *lines, last = (html.escape(line.rstrip()) for line in screen.display)
    return TERMINAL.format("\n".join([f"<b>{first}</b>", *lines, f"<i>{last}</i>"]))


def main() -> int:
    if shutil.which("chromium") is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 1
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    page = (ROOT / "tests" / "golden" / "demo.html").as_uri()
    for name, (size, flags) in PICTURES.items():
        shoot(page, out / f"{name}.png", size, flags)
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        address = f"127.0.0.1:{free_port()}"
        running = processes.start([*GPU_EXPORTER, "demo", f"--web.listen-address={address}", "--duration=40s"])
        wait_for(
            lambda: "would write" in running.log().lower() or "candidate" in running.log(), "an idle holder", 40, 0.5
        )
        (Path(name) / "top.html").write_text(read_top(address), encoding="utf-8")
        shoot((Path(name) / "top.html").as_uri(), out / "top.png", "1400,345")
    if "--save" in sys.argv[1:]:
        for name in ("status-page-light", "status-page-dark", "status-page-phone", "top"):
            shutil.copy(out / f"{name}.png", ROOT / "docs" / "pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
