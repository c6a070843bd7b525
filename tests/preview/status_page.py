"""The status page of the demo's node as a picture: out/status-page.png. Needs Debian's chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 1
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    page = ROOT / "tests" / "golden" / "demo.html"
    for scheme in ("light", "dark"):
        with tempfile.TemporaryDirectory() as profile:
            picture = out / f"status-page-{scheme}.png"
            dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
            subprocess.run(
                [
                    chromium,
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    "--no-first-run",
                    "--disable-background-networking",
                    *dark,
                    "--window-size=1500,760",
                    f"--user-data-dir={profile}",
                    f"--screenshot={picture}",
                    page.as_uri(),
                ],
                check=True,
                capture_output=True,
            )
            print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
