"""Requests to a PromQL API over HTTP, with the certificates and the credentials of the site."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpu_exporter.common.address import Address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import ANSWER_S, MOST_BYTES, FetchError, fetch_text
from gpu_exporter.common.files import in_memory, read_named

SECRET_MAX = 64 * 1024  # bytes of a token or a password
SECRET_HEADER = re.compile("auth|cookie|credential|key|pass|secret|signature|token", re.IGNORECASE)
PEM_MAX = 2**20  # bytes of a file of certificates or of a key; all authorities of a system have some 250 kB
NO_API = (404, 405, 501)  # of servers that know no such path, or no POST
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)")  # RFC 9110, 5.1


class Fetch(Protocol):
    """Sends GET, or POST if there is a form. Limits the answer in bytes and in seconds. Raises AnswerError."""

    def __call__(self, address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str: ...


class Credentials:
    """Credentials for a PromQL API: a bearer token, or a user with a password, and further headers.

    Token and password are files, read for each request, because they may change while the program runs.
    """

    def __init__(
        self,
        token: Path | None = None,
        user: str = "",
        password: Path | None = None,
        headers: Sequence[str] = (),
        header_file: Path | None = None,
        flags: str = "--source",
    ) -> None:
        """`headers`: each as `Name: value`. `header_file`: the same, one per line, for secret values. `flags`: the
        prefix of the names of these options, for errors. Raises ValueError.
        """
        self._flags = flags
        if token is not None and user:
            raise ValueError(f"set either {flags}.bearer-token-file or {flags}.basic-auth.username, not both")
        if bool(user) != (password is not None):
            raise ValueError(f"set {flags}.basic-auth.username and {flags}.basic-auth.password-file together")
        if ":" in user:
            raise ValueError(f"{flags}.basic-auth.username: a user name must not contain a colon (RFC 7617)")
        self._token, self._user, self._password = token, user, password
        self._headers = dict(parse_header(text, f"{flags}.header") for text in headers)
        self._header_file = header_file
        self.headers()  # so that an unreadable file is detected at the start

    def headers(self) -> dict[str, str]:
        """Headers of one request. Raises ValueError, whose text contains no part of a secret."""
        headers = self._read_headers()
        if self._token is not None:
            token = _read_secret(self._token, f"{self._flags}.bearer-token-file")
            if not re.fullmatch(r"[\x21-\x7e]+", token):
                raise ValueError(
                    f"{self._flags}.bearer-token-file {self._token}: a token must be one word of printable ASCII"
                )
            headers["Authorization"] = f"Bearer {token}"
        elif self._password is not None:
            password = _read_secret(self._password, f"{self._flags}.basic-auth.password-file")
            if "\n" in password:
                raise ValueError(f"{self._flags}.basic-auth.password-file {self._password}: it has more than one line")
            pair = base64.b64encode(f"{self._user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
        return headers

    def _read_headers(self) -> dict[str, str]:
        headers = dict(self._headers)
        if self._header_file is not None:
            flag = f"{self._flags}.header-file"
            lines = _read_secret(self._header_file, flag).splitlines()
            headers |= dict(parse_header(line, f"{flag} {self._header_file}") for line in lines if line.strip())
        return headers

    def tenant(self) -> list[str]:
        """Returns the texts that may select a server's tenant: headers, user, and path of the token file. The token
        itself may change without a change of the tenant. Secret, because headers are. Raises ValueError.
        """
        headers = sorted((name.lower(), value) for name, value in self._read_headers().items())
        token = "" if self._token is None else str(self._token.absolute())
        return [token, self._user, *(f"{name}: {value}" for name, value in headers)]

    def check_address(self, address: Address) -> None:
        """Raises ValueError if the address names a user, and these credentials name another user or a token."""
        if address.login and (self._token is not None or self._user):
            raise ValueError(f"{address} has a user, and {self._flags}.* names another user: remove one of them")


def parse_header(text: str, flag: str = "--source.header") -> tuple[str, str]:
    """Splits a header into name and value. Raises ValueError, whose text does not contain the value."""
    match = HEADER.fullmatch(text.strip())
    if match is None:  # nothing is quoted, since all of it may be the value
        raise ValueError(f"{flag}: write a header as 'Name: value', such as 'X-Scope-OrgID: team-a'")
    if match[1].lower() in ("authorization", "host", "content-length", "content-type", "transfer-encoding"):
        hint = (
            "use --source.bearer-token-file or --source.basic-auth.*"
            if match[1].lower()[0] == "a"
            else "the reconciler sets this header itself"
        )
        raise ValueError(f"{flag}: {match[1]}: {hint}")
    return match[1], match[2]


def _read_secret(path: Path, flag: str) -> str:
    """The content of a file without line breaks at its end. Raises ValueError."""
    try:
        text = read_named(path, SECRET_MAX).decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ValueError(f"{flag} {path}: {why}") from exc
    if not text:
        raise ValueError(f"{flag} {path}: it is empty")
    return text


def _build(ca: bytes | None, cert: bytes | None, key: bytes | None) -> ssl.SSLContext | None:
    """Builds the TLS context from the contents of these files. Raises OSError."""
    if ca is None and cert is None:
        return None
    with contextlib.ExitStack() as stack:
        names = [None if data is None else stack.enter_context(in_memory(data)) for data in (ca, cert, key)]
        context = ssl.create_default_context(cafile=names[0])
        if names[1] is not None:
            context.load_cert_chain(names[1], names[2])
        return context


class Client:
    """Fetches pages with the credentials and certificates of the site. Reads changed certificate files again."""

    def __init__(
        self,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`ca`: certificate authorities of the source. `cert`, `key`: the client certificate of the reconciler.

        Raises ValueError, OSError.
        """
        self._credentials = credentials or Credentials()
        if (cert is None) != (key is None):
            raise ValueError("set --source.tls.cert and --source.tls.key together")
        self._ca, self._cert, self._key = ca, cert, key
        self._files = self._read_files()
        self._context = _build(*self._files)

    def tenant(self, address: Address) -> str:
        """Returns a digest of all that may select the data that the server shows to this client. Raises ValueError."""
        cert = "" if self._cert is None else str(self._cert.absolute())
        user = address.login.partition(":")[0]
        texts = [cert, user, address.query, *self._credentials.tenant()]
        return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()

    def _read_files(self) -> tuple[bytes | None, ...]:
        return tuple(
            read_named(path, PEM_MAX) if path is not None else None for path in (self._ca, self._cert, self._key)
        )

    def __call__(
        self,
        address: Address,
        form: Mapping[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
        within_s: float = ANSWER_S,
    ) -> str:
        try:
            files = self._read_files()
            if files != self._files:  # not their dates: a file may be changed again within one tick of the clock
                self._files, self._context = files, _build(*files)
        except OSError as exc:  # includes ssl.SSLError
            raise AnswerError(f"--source.tls: {exc}") from exc
        try:
            headers = self._credentials.headers()
        except ValueError as exc:
            raise AnswerError(str(exc)) from exc
        try:
            return fetch_text(address, form, most_bytes, within_s, self._context, headers)
        except FetchError as exc:
            if form is not None and exc.status in NO_API and str(exc).endswith(f"status {exc.status}"):
                hint = (
                    "no PromQL API answers there: give the address and path before /api/v1, as http://prometheus:9090"
                )
                raise FetchError(f"{exc}: {hint}", exc.status) from exc
            raise
