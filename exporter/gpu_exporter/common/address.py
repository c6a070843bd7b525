"""The address of a server, separated from the user and password of the same URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit, urlunsplit

from gpu_exporter.common.slurm.hostlist import parse_names

FORM = "expected http://HOST:PORT or https://HOST:PORT"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server or of one of its pages.

    `text` has no user, password or query, so it may be printed and logged. Only requests and digests may contain
    `query` and `login` (user and password, URL-encoded).
    """

    text: str
    query: str = field(default="", repr=False)
    login: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def place(self) -> str:
        """HOST or HOST:PORT, as it was written."""
        return urlsplit(self.text).netloc

    @property
    def path(self) -> str:
        return urlsplit(self.text).path

    @property
    def host(self) -> str:
        """The host without brackets, in lower case."""
        return urlsplit(self.text).hostname or ""

    @property
    def port(self) -> int | None:
        return urlsplit(self.text).port

    def page(self, path: str, query: str = "") -> Address:
        """Returns the address of the page at this path below this address. `query`: further parameters."""
        query = "&".join(filter(None, (self.query, query)))
        return replace(self, text=f"{self.text.rstrip('/')}{path}", query=query)

    def at(self, path: str) -> Address:
        """Returns the address of the page at this path on the same server, without a query."""
        return replace(self, text=urlunsplit(urlsplit(self.text)._replace(path=path)), query="")

    def is_same_server(self, other: Address) -> bool:
        """Returns whether scheme, host and port are the same, so that both may get the same credentials."""
        scheme, another = urlsplit(self.text).scheme, urlsplit(other.text).scheme
        return (scheme, self.host, self.port) == (another, other.host, other.port)


def parse_address(text: str, scheme: str = "") -> Address:
    """Parses the address of a server.

    `scheme`: used if the text has no scheme, as in HOST:PORT; "" if the text must have one. Raises ValueError, whose
    text repeats no part of the address, because any part may be a badly written password.
    """
    given, separator, rest = text.partition("://")
    if not separator and scheme:
        given, rest = scheme, text
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :]:
        raise ValueError("an @ after the host: write @ as %40, / as %2F, ? as %3F and # as %23")
    login, _, place = authority.rpartition("@")
    url = f"{given.lower()}://{place}{rest[len(authority) :]}"
    try:
        parts = urlsplit(url)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the text of the error quotes the port
        is_usable = False
    if not is_usable or given.lower() not in ("http", "https") or not text.isprintable() or " " in text:
        raise ValueError(FORM)
    return Address(urlunsplit(parts._replace(query="", fragment="")), parts.query, login)


def expand_hosts(text: str) -> list[str]:
    """Expands a list of hosts to one address per host: `http://gpu-[01-40]:9836`, `gpu-1,gpu-9`.

    Raises ValueError. As in parse_address, its text repeats no part of the address.
    """
    head, separator, rest = text.rpartition("://")
    place = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in text or re.search(r"\[[^]]*:", place):  # a password may look like a list; brackets of an IPv6 address
        return [text]
    try:
        return [f"{head}{separator}{name}{rest[len(place) :]}" for name in parse_names(place)] or [text]
    except ValueError:
        raise ValueError("expected HOST, or a list of hosts such as gpu-[01-40]") from None
