"""Accepted Host names, against DNS rebinding: a foreign page could point its own name here and read the answer.

That name is always one of the attacker's domain: never an address, a name without a dot, one of a cluster's Services,
or this machine's.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

OF_CLUSTERS = (".svc", ".cluster.local", ".localhost")
RESOLVER = Path("/etc/resolv.conf")
RESOLVER_MAX = 65_536


def own_names(machine: str = "", resolver: Path = RESOLVER) -> frozenset[str]:
    """The machine's name, by itself and in the domains in which it looks for others (resolv.conf(5), search)."""
    machine = (machine or os.uname().nodename).lower()
    short = machine.partition(".")[0]
    try:
        with resolver.open(encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file.read(RESOLVER_MAX).splitlines()]
    except OSError:
        lines = []
    domains = {domain for words in lines if words[:1] in (["search"], ["domain"]) for domain in words[1:]}
    return frozenset({machine, *(f"{short}.{domain.strip('.').lower()}" for domain in domains)})


def is_expected(host: str, names: Collection[str]) -> bool:
    """Whether `host`, a header of that name ("" for none), may be meant. `names`: of this place, in lower case."""
    name = _name(host)
    if not name or "." not in name or name.endswith(OF_CLUSTERS) or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Without the port, and in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
