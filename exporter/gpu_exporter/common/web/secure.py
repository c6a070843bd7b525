"""TLS and passwords of a port: the settings in use, and their update when the file changes."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path

from gpu_exporter.common.files import in_memory
from gpu_exporter.common.web.settings import CLIENTS, TLS, VERSIONS, WebConfigError, WebSettings, read_settings

log = logging.getLogger(__name__)
TRIED_MAX = 256  # headers with a correct password that are remembered, and the same number with a wrong one
HASH_LENGTH = 60  # of every bcrypt hash
# The hash of no password: checking an unknown user takes as much time as checking a wrong password.
NOBODY = "$2b$10$KNkLq/jEmlsfvs/EziYNA.zAtzpDFuN9WoAbP1TxZ3rUxFhIPV09y"


class Security:
    """The settings in use. `context`: None without TLS."""

    def __init__(self, path: Path, settings: WebSettings | None = None, before: WebSettings | None = None) -> None:
        """`settings`: parsed from the file at `path`; by default the file is read now. `before`: the settings in use
        until now. Raises WebConfigError.
        """
        self._path = path
        settings = settings or read_settings(path, before)
        try:
            self.context = self._build(settings)
        except WebConfigError:
            if before is None or TLS not in settings.kept:
                raise
            settings = settings._replace(named=before.named)  # the certificates changed after their section was lost
            self.context = self._build(settings)
        self.settings = settings
        self._users = self._read_users(settings.users)
        self._tried: dict[bytes, bool] = {}  # by digest of the header, whether its password was correct

    @property
    def wants_password(self) -> bool:
        return bool(self._users)

    @property
    def is_open(self) -> bool:
        """Whether the port can be read without a password and without a client certificate."""
        has_certificate = self.context is not None and self.context.verify_mode is ssl.CERT_REQUIRED
        return not (self.wants_password or has_certificate)

    def recall(self, authorization: str) -> bool | None:
        """Returns whether a header is correct, if the answer is already known; None if bcrypt must compute it."""
        known = self._tried.get(_digest(authorization))
        if known is None and self._parse(authorization) is None:
            return False
        return known

    def admits(self, authorization: str) -> bool:
        """Returns whether an Authorization header names a user with the right password. Takes some 50 ms of CPU."""
        import bcrypt

        parsed = self._parse(authorization)
        if parsed is None:
            return False
        user, password = parsed
        known = self._users.get(user.decode("utf-8", "replace"))
        try:
            is_right = bcrypt.checkpw(password[:72], (known or NOBODY).encode()) and known is not None
        except ValueError:  # a NUL byte
            is_right = False
        tried = [digest for digest, was_right in self._tried.items() if was_right == is_right]
        if len(tried) >= TRIED_MAX:  # drop the oldest; wrong passwords never displace a correct one
            self._tried.pop(tried[0], None)
        self._tried[_digest(authorization)] = is_right
        return is_right

    @staticmethod
    def _parse(authorization: str) -> tuple[bytes, bytes] | None:
        """User and password of a header, None for another scheme."""
        scheme, _, encoded = authorization.partition(" ")
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return None
        return (user, password) if scheme.lower() == "basic" and colon else None

    def _error(self, text: str) -> WebConfigError:
        return WebConfigError(f"{self._path}: {text}")

    def _build(self, settings: WebSettings) -> ssl.SSLContext | None:
        tls, named = settings.tls, settings.named
        if not tls:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[tls.get("min_version") or "TLS12"]
        context.maximum_version = VERSIONS[tls.get("max_version") or "TLS13"]
        try:
            with contextlib.ExitStack() as stack:
                paths = {key: stack.enter_context(in_memory(content)) for key, content in named.items()}
                context.load_cert_chain(paths["cert_file"], paths["key_file"], password=_no_password)
                if "client_ca_file" in paths:
                    context.load_verify_locations(paths["client_ca_file"])
        except (OSError, ValueError) as exc:
            raise self._error(f"{TLS}: {', '.join(tls[key] for key in named)}: {exc}") from exc
        context.verify_mode = CLIENTS[tls.get("client_auth_type") or "NoClientCert"]
        return context

    def _read_users(self, users: Mapping[str, str]) -> dict[str, str]:
        if not users:
            return {}
        try:
            import bcrypt
        except ModuleNotFoundError as exc:
            raise self._error("basic_auth_users needs bcrypt: pip install bcrypt") from exc
        for user, hashed in users.items():
            try:
                bcrypt.checkpw(b"", hashed.encode())
                if len(hashed) != HASH_LENGTH:  # bcrypt takes a hash without its end, which no password matches
                    raise ValueError("length")
            except ValueError as exc:
                raise self._error(
                    f"basic_auth_users.{user}: not a bcrypt hash: create one with `htpasswd -nBC 10 {user}`"
                ) from exc
        return dict(users)


class WebConfig:
    """The settings of a port while it is served. `security`: the settings in use. `problem`: why they differ from the
    file; "" if they do not.
    """

    def __init__(self, path: Path) -> None:
        """Reads the settings from the file at `path`. Raises WebConfigError."""
        self._path = path
        self.security = Security(path)
        self.problem = ""
        self._seen = self._settled = self.security.settings.digest

    def turn(self) -> bool:
        """Reads the files again. Returns true if `security` is new.

        Applies a change only after two calls in a row have read the same content, because a program may still be
        writing.
        """
        settings, found = None, ""
        try:
            settings = read_settings(self._path, self.security.settings)
            found = settings.digest
        except WebConfigError as exc:
            found = str(exc)
        before, self._seen = self._seen, found
        if found == self._settled or found != before:
            return False
        self._settled = found
        fault = "" if settings is not None else found
        if settings is not None:
            try:
                self.security = Security(self._path, settings, self.security.settings)
            except WebConfigError as exc:
                fault = str(exc)
        kept = "" if settings is None else ", ".join(settings.kept)
        if fault:
            self.problem = f"{fault}; the previous certificates and passwords remain in use"
        elif kept:
            self.problem = (
                f"{self._path}: without {kept} the port would be less protected, so the former setting "
                "remains in force, and the rest of the file is in use: complete the file, or restart the "
                "process"
            )
        else:
            self.problem = ""
        if self.problem:
            log.error("%s", self.problem)
        else:
            log.info("%s: reloaded", self._path)
        return not fault


def _digest(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode()).digest()


def _no_password() -> str:
    raise ValueError("the key is encrypted; it must be readable without a password")
