"""After the driver was replaced: a new process, since the loaded library no longer fits the kernel module.

In a container the library is mounted at its start, so the container must be restarted: we exit, the kubelet does it.
On a host the process replaces itself, once; a second mismatch soon after is left to whoever supervises us.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from gpu_exporter.app.once import exit_now
from gpu_exporter.exits import Exit

log = logging.getLogger(__name__)
AGAIN_S = 600.0
MARK = "GPU_EXPORTER_RESTARTED"  # in the environment of the process that took over: when
CONTAINER_FILES = (Path("/.dockerenv"), Path("/run/.containerenv"))


def is_container() -> bool:
    """Whether this process runs in a container: Kubernetes, Docker and Podman, or systemd-nspawn say so."""
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ
        or "container" in os.environ
        or any(path.exists() for path in CONTAINER_FILES)
    )


def restarted_lately(wall: float) -> bool:
    """Whether this process took over from one that met a replaced driver, not long before `wall` (Unix seconds)."""
    try:
        return 0 <= wall - float(os.environ.get(MARK, "")) < AGAIN_S
    except ValueError:
        return False


def restart_or_exit(action: str, wall: float) -> NoReturn:
    """Replace this process by a new one of itself, or exit.

    `action`: "restart", "exit", or "auto" for what fits the place. `wall`: the time, Unix seconds.
    """
    if action == "exit" or (action == "auto" and is_container()) or restarted_lately(wall):
        log.error("the driver was replaced: the exporter exits with status %d and must be started again", Exit.DRIVER_REPLACED)
        exit_now(Exit.DRIVER_REPLACED)
    log.warning("the driver was replaced: this process restarts")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(  # noqa: S606 - ourselves, as we were started
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, MARK: str(wall)}
        )
    except OSError as exc:
        log.error("cannot restart: %s: %s", sys.executable, exc)
        exit_now(Exit.DRIVER_REPLACED)
