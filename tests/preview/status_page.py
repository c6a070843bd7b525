"""Draws status page, usage report and `gpu-exporter top` into out/: python -m tests.preview.status_page [--save] [top]

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

from gpu_exporter.reports.usage.render.page import render_page
from gpu_exporter.reports.usage.render.view import ReportView
from tests.testbed.processes import GPU_EXPORTER, Processes, free_port, wait_for
from tests.testbed.usage import build_report

ROOT = Path(__file__).resolve().parents[2]
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
PICTURES = {  # the size in pixels, and further flags
    "status-page-light": ("1300,800", ()),
    "status-page-dark": ("1500,800", DARK),
    "status-page-phone": ("500,1100", ()),  # headless Chromium has no smaller window
    "report": ("1000,860", ()),
}
LINES = 24
TERMINALS = {  # columns, TERM, the colours of text and background
    "top": (160, "xterm-256color", "#e6edf3", "#0d1117"),
    "top-light": (160, "xterm-256color", "#1f2328", "#ffffff"),
    "top-80": (80, "xterm", "#e6edf3", "#0d1117"),
    "top-80-light": (80, "xterm", "#1f2328", "#ffffff"),
    "top-200": (200, "xterm-256color", "#e6edf3", "#0d1117"),
}
XTERM = {"black": "#000000", "red": "#cd0000", "green": "#00cd00", "brown": "#cdcd00", "white": "#e5e5e5"}
TERMINAL = """<!doctype html><meta charset=utf-8><style>body {{ margin: 0; background: {back}; }}
pre {{ margin: 0; padding: 14px; color: {text}; font: 14px/1.4 "DejaVu Sans Mono", "Liberation Mono", monospace; }}
</style><pre>{lines}</pre>"""


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


def draw_screen(screen: pyte.Screen, text: str, back: str) -> str:
    """What a terminal with these colours shows, as HTML."""
    lines = []
    for y in range(screen.lines):
        cells = []
        for x in range(screen.columns):
            cell = screen.buffer[y][x]
            ink, paper = (
                default if name == "default" else XTERM.get(name, f"#{name}")
                for name, default in ((cell.fg, text), (cell.bg, back))
            )
            ink, paper = (paper, ink) if cell.reverse else (ink, paper)
            style = f"color:{ink};background:{paper}" + (";font-weight:bold" if cell.bold else "")
            cells.append(f'<span style="{style}">{html.escape(cell.data)}</span>')
        lines.append("".join(cells))
    return TERMINAL.format(text=text, back=back, lines="\n".join(lines))


def read_top(address: str, columns: int, kind: str) -> pyte.Screen:
    """The screen of `top` on a terminal of this kind."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS", "NO_COLOR")}
    environment = {**inherited, "TERM": kind}
    process = subprocess.Popen(
        [*GPU_EXPORTER, "top", f"--from={address}"], stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    screen = pyte.Screen(columns, LINES)
    feed, until = pyte.ByteStream(screen), time.monotonic() + 4
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            feed.feed(os.read(ours, 65536))
    process.kill()
    process.wait()
    os.close(ours)
    return screen


def main() -> int:
    if shutil.which("chromium") is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 1
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    page = ROOT / "tests" / "golden" / "demo.html"
    report = out / "report.html"
    report.write_text(render_page(build_report("wind"), ReportView()), "utf-8")
    for name, (size, flags) in PICTURES.items() if "top" not in sys.argv[1:] else ():
        shoot((report if name == "report" else page).as_uri(), out / f"{name}.png", size, flags)
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        address = f"127.0.0.1:{free_port()}"
        running = processes.start([*GPU_EXPORTER, "demo", f"--web.listen-address={address}", "--duration=40s"])
        wait_for(
            lambda: "would write" in running.log().lower() or "candidate" in running.log(), "an idle holder", 40, 0.5
        )
        for picture, (columns, kind, text, back) in TERMINALS.items():
            shown = Path(name) / f"{picture}.html"
            shown.write_text(draw_screen(read_top(address, columns, kind), text, back), encoding="utf-8")
            shoot(shown.as_uri(), out / f"{picture}.png", f"{round(8.43 * columns) + 30},{20 * LINES + 28}")
    if "--save" in sys.argv[1:]:
        for name in ("status-page-light", "status-page-dark", "status-page-phone", "report", "top"):
            shutil.copy(out / f"{name}.png", ROOT / "docs" / "pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
