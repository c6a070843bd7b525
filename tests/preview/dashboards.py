"""Draws the dashboards as pictures (out/dashboard-NAME.png), and tests every panel.

    python -m tests.preview.dashboards [--hours 12] [--only fleet] [--theme light] [--save]

A real Prometheus gets half a day of a simulated cluster and evaluates the recording rules. A page with Grafana's own
components (@grafana/ui) draws each dashboard in headless Chromium. The exit status is 1 if a panel shows an error, has an
unsupported type, or has no data without a reason. --save stores small pictures in docs/pictures.

Needs Debian's chromium, prometheus and npm (20.19 or newer); npm's packages are kept in the cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

from tests.preview.history import levels, load, record, write_day, write_week_before
from tests.testbed.processes import Processes
from tests.testbed.servers import Prometheus

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).resolve().parent / "grafana"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-exporter" / "preview"
BOARDS = ("fleet", "holder", "node", "operations")
WIDTH, ROW, SMALL = 1600, 38, 0.6  # pixels, and the scale of the stored pictures
# Backfilled series have no end marker, so by default each would continue for five minutes. Samples are a
# minute apart.
LOOKBACK = ("--query.lookback-delta=59s",)
NO_DATA = {  # panels without data here, and the reason
    ("fleet", "Candidates for a smaller GPU"): "no holder has held a GPU for long enough",
    ("holder", "Marks"): "not every holder gets a mark",
    ("holder", "Mark"): "not every holder gets a mark",
    ("holder", "Cause"): "the host of a simulated node is not read",
    ("holder", "CPU cores"): "the host of a simulated node is not read",
    ("holder", "CPUs"): "the host of a simulated node is not read",
    ("holder", "Disks"): "the host of a simulated node is not read",
    ("holder", "Slowed down"): "not every holder is slowed down",
    ("node", "XID errors"): "the simulated nodes have no event thread here",
    ("operations", "Firing alerts"): "recordings alone are evaluated afterwards",
    ("operations", "Age of the state file"): "there is no state directory",
    ("operations", "Driver errors"): "the driver makes none",
    ("operations", "Actions"): "actions are off",
    ("operations", "Actions held back"): "actions are off",
    ("operations", "Regret"): "it is possible that no holder worked again",
}


def build_page() -> Path:
    """The folder of the built page. It is built again only if its sources change."""
    sources = sorted(path for path in PAGE.rglob("*") if path.is_file())
    packages = hashlib.sha256((PAGE / "package.json").read_bytes()).hexdigest()[:16]
    whole = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    place = CACHE / packages
    built = place / f"page-{whole}"
    if built.exists():
        return built
    place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(PAGE, place, dirs_exist_ok=True)
    if not (place / "node_modules" / ".package-lock.json").exists():
        print("npm install: about a minute", flush=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=place, check=True)
    public = place / "public" / "public"
    icons = place / "node_modules" / "@grafana" / "ui" / "dist" / "public" / "img" / "icons"
    shutil.copytree(icons, public / "build" / "img" / "icons", dirs_exist_ok=True)
    subprocess.run(["npm", "run", "build", "--silent"], cwd=place, check=True)
    (place / "dist").rename(built)
    return built


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the page, the dashboards, and Prometheus below /prom."""

    prometheus = ""

    def do_GET(self) -> None:
        if not self.path.startswith("/prom/"):
            super().do_GET()
            return
        try:
            with urllib.request.urlopen(self.prometheus + self.path.removeprefix("/prom"), timeout=60) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as exc:
            status, body = exc.code, exc.read()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def translate_path(self, path: str) -> str:
        if path.startswith("/dashboards/"):
            return str(ROOT / "grafana" / path.lstrip("/").partition("?")[0])
        return super().translate_path(path)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def browse(url: str, width: int, height: int, *flags: str) -> str:
    """The output of headless Chromium."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--disable-background-networking", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        done = subprocess.run(
            [*command, "--virtual-time-budget=60000", *flags, url],
            env={**os.environ, "TZ": "UTC"}, capture_output=True, text=True, check=True, timeout=240,
        )  # fmt: skip
        return done.stdout


def height(board: str) -> int:
    """The height of the whole dashboard, in pixels."""
    panels = json.loads((ROOT / "grafana" / "dashboards" / f"gpu-{board}.json").read_text("utf-8"))["panels"]
    rows: int = max(panel["gridPos"].get("y", 0) + panel["gridPos"]["h"] for panel in panels)
    return ROW * rows + 16


def faults(board: str, dom: str) -> list[str]:
    """The faults of the panels of a drawn dashboard."""
    if 'data-ready="1"' not in dom:
        return [f"{board}: not drawn in time"]
    panels = re.findall(r'<div [^>]*data-panel-title="([^"]*)"[^>]*data-state="(\w+)"([^>]*)>', dom)
    found = [f"{board}: no panels"] if not panels else []
    for title, state, rest in panels:
        title = unescape(title)
        error = re.search(r'data-error="([^"]*)"', rest)
        if state in ("error", "unsupported", "loading") or (state == "nodata" and (board, title) not in NO_DATA):
            found.append(f"{board}: {title}: {state} {unescape(error[1]) if error else ''}")
    print(f"{board}: {len(panels)} panels, {sum(state == 'ok' for _, state, _ in panels)} with data")
    return found


def choose(prometheus: Prometheus, end: int) -> dict[str, dict[str, str]]:
    """Variables of each dashboard: the holder with a training that has been idle for longest, and a node."""
    idle = 'min by (namespace, pod, node) (gpu_allocation_idle_run_seconds{pod!=""})'
    trains = "max by (namespace, pod, node) (gpu_training_steps_total)"
    rows = prometheus.query(f"topk(1, {idle} and on (namespace, pod, node) {trains})", end)
    holder = {f"var-{name}": rows[0][0].get(name, "") for name in ("namespace", "pod", "node")}
    return {"fleet": {}, "holder": holder, "node": {"var-node": "gpu-node-1"}, "operations": {}}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--hours", type=int, default=12)
    parser.add_argument("--only", choices=BOARDS, action="append")
    parser.add_argument("--theme", choices=("dark", "light"), default="dark")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    missing = [name for name in ("chromium", "npm", "prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    page = build_page()
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        directory = Path(name)
        end = int(time.time()) // 60 * 60 - 120
        start = end - options.hours * 3600
        write_day(directory / "day.om", end, options.hours)
        data = directory / "prometheus" / "data"
        load(directory / "day.om", data)
        for rules in levels(sorted((ROOT / "alerts" / "rules").glob("*.yaml"))):
            with Processes(directory) as passing:
                record(Prometheus(passing, directory / "prometheus", {}, flags=LOOKBACK).url, data, rules, start, end)
        with Processes(directory) as passing:
            url = Prometheus(passing, directory / "prometheus", {}, flags=LOOKBACK).url
            write_week_before(directory / "before.om", url, start, end)
        load(directory / "before.om", data)
        prometheus = Prometheus(processes, directory / "prometheus", {}, flags=LOOKBACK)
        Handler.prometheus = prometheus.url
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(page)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for board, chosen in choose(prometheus, end).items():
            if options.only and board not in options.only:
                continue
            form = {"dash": f"/dashboards/gpu-{board}.json", "from": start, "to": end, "theme": options.theme, **chosen}
            url = f"http://127.0.0.1:{server.server_address[1]}/index.html?{urlencode(form)}"
            size = WIDTH, height(board)
            wrong += faults(board, browse(url, *size, "--dump-dom"))
            picture = out / f"dashboard-{board}.png"
            browse(url, *size, f"--screenshot={picture}")
            print(picture)
            if options.save:
                small = ROOT / "docs" / "pictures" / picture.name
                browse(url, *size, f"--screenshot={small}", f"--force-device-scale-factor={SMALL}")
                note_source(board)
        server.shutdown()
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


def note_source(board: str) -> None:
    """Keep the hash of the dashboard beside its picture: a release compares it (tools/release.py)."""
    path, name = ROOT / "docs" / "pictures" / "drawn-from.txt", f"gpu-{board}.json"
    kept = [line for line in (path.read_text("ascii").splitlines() if path.exists() else []) if not line.endswith(name)]
    digest = hashlib.sha256((ROOT / "grafana" / "dashboards" / name).read_bytes()).hexdigest()
    path.write_text("".join(f"{line}\n" for line in sorted([*kept, f"{digest}  {name}"])), "ascii")


if __name__ == "__main__":
    sys.exit(main())
