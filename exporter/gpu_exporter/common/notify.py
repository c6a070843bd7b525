"""Reports the state of a program to systemd, for units with `Type=notify` and `WatchdogSec=`."""

from __future__ import annotations

import contextlib
import os
import socket

READY = "READY=1"
WATCHDOG = "WATCHDOG=1"
PATIENCE_S = 1.0  # systemd reads at once; a socket without a reader must not stop the program


def notify(state: str) -> None:
    """Sends READY or WATCHDOG to the socket that systemd names in NOTIFY_SOCKET (sd_notify(3)).

    Does nothing without systemd, or if the socket does not take the message.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address  # @: a name that is not in the file system
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as place:
        place.settimeout(PATIENCE_S)
        place.sendto(state.encode("ascii"), name)
