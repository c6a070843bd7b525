"""Listening sockets: TCP for IPv4 and IPv6, and a unix socket with given permissions."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gpu_exporter.common.web.request import parse_listen_address

BACKLOG = 128  # connections that the kernel holds until they are accepted


def listen_tcp(address: str) -> socket.socket:
    """Opens a listening TCP socket, for both families without a host. Raises ValueError, OSError with the address."""
    host, port = parse_listen_address(address)
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        try:
            return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=BACKLOG)
        except OSError as exc:
            if not both or exc.errno == errno.EADDRINUSE:
                raise
            return socket.create_server((host, port), backlog=BACKLOG)  # no IPv6 on this host
    except OSError as exc:
        raise OSError(exc.errno, f"cannot listen on {address}: {os.strerror(exc.errno or 0)}") from exc


def listen_unix(path: Path, mode: int) -> socket.socket:
    """Opens a unix socket. `mode`: its permissions, whatever the umask. Call it before other threads create files."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o777 & ~mode)  # bind() sets 0777 minus the umask: the socket never has more permissions
    try:
        listener.bind(str(path))
    finally:
        os.umask(umask)
    listener.listen(BACKLOG)
    return listener
