"""Sockets that listen: TCP of both families, and a unix socket with the permissions that are asked for."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from gpu_exporter.web.request import parse_listen_address

BACKLOG = 128  # connections that the kernel keeps until they are accepted


def listen_tcp(address: str) -> socket.socket:
    """A listening TCP socket, of both families for an empty host. Raises ValueError, OSError that names the address."""
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
    """`mode`: permissions, whatever the umask is. Call it before other threads make files."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o777 & ~mode)  # bind() makes it 0777 less the umask: never open for a moment
    try:
        listener.bind(str(path))
    finally:
        os.umask(umask)
    listener.listen(BACKLOG)
    return listener
