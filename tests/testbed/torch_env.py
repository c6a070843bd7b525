"""Makes the environment with torch in the cache, and prints the path of its packages. 20 packages, some 5 GB, once.

`python -m tests.testbed.torch_env [SET]`: a set of requirements by name, "ci" by default. Packages are those of the
Python that runs this: the hook has to run on older ones than the exporter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMMON = ("numpy>=2", "pytest>=8.0", "hypothesis>=6.100", "prometheus-client>=0.20")
SETS = {
    "ci": ("torch==2.15.0", *COMMON),
    "old": ("torch==2.4.1", "numpy<2.3", *COMMON[1:]),  # the oldest that knows the UUID of a GPU
    "oldest": ("torch==2.1.2", "numpy<2", *COMMON[1:]),  # for Python 3.9
    "frameworks": ("torch==2.15.0", "lightning", "transformers", "accelerate", *COMMON),
}


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-exporter" / "torch"


def make(name: str) -> Path:
    """The packages of an environment; made by rename, so that a broken download leaves nothing. Raises CalledProcessError."""
    wanted = "\n".join((sys.version.split()[0], *SETS[name]))
    place = cache() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            fresh = Path(tempfile.mkdtemp(prefix="making-", dir=place.parent))
            try:
                packages = fresh / "packages"
                venv.create(fresh / "venv", with_pip=True)  # Debian's Python has no pip of its own
                pip = [str(fresh / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
                # A folder of packages and not a venv, because a venv contains its own path.
                subprocess.run(
                    [*pip, "install", "--quiet", f"--target={packages}", *SETS[name]], check=True, stdout=sys.stderr
                )
                shutil.rmtree(fresh / "venv")
                fresh.rename(place)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
    return place / "packages"


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else "ci"))
