"""Restarts the process after the driver was replaced, because the loaded library no longer fits the kernel module.

A container gets the library when it starts. So the process exits, and the kubelet restarts the container. On a host,
the process replaces itself once. After a second mismatch within AGAIN_S, it exits, and the service manager must restart
it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from gpu_exporter.common.exits import Exit

log = logging.getLogger(__name__)
AGAIN_S = 600.0
MARK = "GPU_EXPORTER_RESTARTED"  # environment variable of the new process: the time of the restart
CONTAINER_FILES = (Path("/.dockerenv"), Path("/run/.containerenv"))


def is_container() -> bool:
    """Returns whether this process runs in a container of Kubernetes, Docker, Podman or systemd-nspawn."""
    return (
        "KUBERNETES_SERVICE_HOST" in os.environ
        or "container" in os.environ
        or any(path.exists() for path in CONTAINER_FILES)
    )


def restarted_lately(wall: float) -> bool:
    """Returns whether `restart_or_exit` started this process less than AGAIN_S before `wall` (Unix seconds)."""
    try:
        return 0 <= wall - float(os.environ.get(MARK, "")) < AGAIN_S
    except ValueError:
        return False


def restart_or_exit(action: str, wall: float) -> int:
    """Replaces this process by a new one, or returns an exit code.

    `action`: "restart", "exit", or "auto" to exit in a container and restart elsewhere. `wall`: Unix seconds.
    """
    if action == "exit" or (action == "auto" and is_container()) or restarted_lately(wall):
        log.error(
            "the driver was replaced: the exporter exits with status %d and must be started again", Exit.DRIVER_REPLACED
        )
        return Exit.DRIVER_REPLACED
    log.warning("the driver was replaced: this process restarts")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(  # noqa: S606 - the same program with the same arguments
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, MARK: str(wall)}
        )
    except OSError as exc:
        log.error("cannot restart: %s: %s", sys.executable, exc)
    return Exit.DRIVER_REPLACED
