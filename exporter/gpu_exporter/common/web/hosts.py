"""Checks the Host header against DNS rebinding: a foreign web page could point its host name at this server and read
the answers.

Such a name is always in the attacker's domain. It is never an address, a name without a dot, the name of a cluster's
Service, or the name of this machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

from gpu_exporter.common.files import read_named

OF_CLUSTERS = (".svc", ".cluster.local", ".localhost")
RESOLVER = Path("/etc/resolv.conf")
RESOLVER_MAX = 65_536


def own_names(machine: str = "", resolver: Path = RESOLVER) -> frozenset[str]:
    """Returns the machine's name, alone and in the search domains of resolv.conf(5)."""
    machine = (machine or os.uname().nodename).lower()
    short = machine.partition(".")[0]
    try:
        text = read_named(resolver, RESOLVER_MAX).decode("utf-8", "replace")
        lines = [line.split() for line in text.splitlines()]
    except OSError:
        lines = []
    domains = {domain for words in lines if words[:1] in (["search"], ["domain"]) for domain in words[1:]}
    return frozenset({machine, *(f"{short}.{domain.strip('.').lower()}" for domain in domains)})


def is_expected(host: str, names: Collection[str]) -> bool:
    """Returns whether the value of the header Host ("" for none) is accepted. `names`: own names in lower case."""
    name = _name(host)
    if not name or "." not in name or name.endswith(OF_CLUSTERS) or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The host without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
