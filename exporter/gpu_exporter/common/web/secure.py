"""TLS and passwords of a port, from a file in the format of Prometheus's own exporters.

Format: github.com/prometheus/exporter-toolkit, docs/web-configuration.md. An unsupported setting is refused by name: if
it were ignored, the port would be more open than the file says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TLS_KEYS = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
TRIED_MAX = 256  # headers with a correct password that are remembered, and the same number with a wrong one
# The hash of no password: checking an unknown user takes as much time as checking a wrong password.
NOBODY = "$2b$10$KNkLq/jEmlsfvs/EziYNA.zAtzpDFuN9WoAbP1TxZ3rUxFhIPV09y"


class WebConfigError(ValueError):
    """The web configuration is invalid. The text names the file, the key and the remedy."""


class Security:
    """The settings of the file, as it was last read. `context`: None without TLS."""

    def __init__(self, path: Path) -> None:
        """Raises WebConfigError."""
        self._path = path
        data = _read(path)
        unknown = sorted(set(data) - {"tls_server_config", "basic_auth_users"})
        if unknown:
            raise self._error(f"{unknown[0]} is not supported; known: tls_server_config, basic_auth_users")
        tls = self._mapping(data, "tls_server_config")
        self._files = tuple(
            self._place(tls[key]) for key in ("cert_file", "key_file", "client_ca_file") if tls.get(key)
        )
        self.stamp = self.read_stamp()  # before the files are read: a change meanwhile causes another read
        self.context = self._build(tls) if tls else None
        self._users = self._read_users(self._mapping(data, "basic_auth_users"))
        self._tried: dict[bytes, bool] = {}  # by digest of the header, whether its password was correct

    @property
    def wants_password(self) -> bool:
        return bool(self._users)

    @property
    def is_open(self) -> bool:
        """Whether the port can be read without a password and without a client certificate."""
        has_certificate = self.context is not None and self.context.verify_mode is ssl.CERT_REQUIRED
        return not (self.wants_password or has_certificate)

    def read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes with the file, and with every file that it names."""
        stamps = []
        for path in (self._path, *self._files):
            try:
                status = path.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(stamps)

    def recall(self, authorization: str) -> bool | None:
        """Whether this header is correct, if it was checked before or cannot be parsed; else None. Returns at once."""
        known = self._tried.get(_digest(authorization))
        if known is None and self._parse(authorization) is None:
            return False
        return known

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header names a user with the right password. Takes some 50 ms of CPU."""
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

    def _place(self, name: str) -> Path:
        return self._path.parent / name

    def _mapping(self, data: Mapping[str, Any], key: str) -> dict[str, str]:
        value = data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
            raise self._error(f"{key}: expected a mapping of names to texts")
        return value

    def _build(self, tls: dict[str, str]) -> ssl.SSLContext:
        unknown = sorted(set(tls) - set(TLS_KEYS))
        if unknown:
            raise self._error(f"tls_server_config.{unknown[0]} is not supported; known: {', '.join(TLS_KEYS)}")
        if not (tls.get("cert_file") and tls.get("key_file")):
            raise self._error("tls_server_config: cert_file and key_file are required")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._choose(tls, "min_version", VERSIONS, "TLS12")
        context.maximum_version = self._choose(tls, "max_version", VERSIONS, "TLS13")
        clients = self._choose(tls, "client_auth_type", CLIENTS, "NoClientCert")
        if (clients is ssl.CERT_NONE) == bool(tls.get("client_ca_file")):
            raise self._error(
                "tls_server_config: client_ca_file and a client_auth_type that verifies must be set together"
            )
        try:
            context.load_cert_chain(self._place(tls["cert_file"]), self._place(tls["key_file"]), password=_no_password)
            if tls.get("client_ca_file"):
                context.load_verify_locations(self._place(tls["client_ca_file"]))
        except (OSError, ValueError) as exc:
            raise self._error(f"tls_server_config: {', '.join(map(str, self._files))}: {exc}") from exc
        context.verify_mode = clients
        return context

    def _choose(self, tls: dict[str, str], key: str, choices: Mapping[str, Any], default: str) -> Any:
        name = tls.get(key, default) or default
        if name not in choices:
            raise self._error(f"tls_server_config.{key}: {name!r} is not supported; known: {', '.join(choices)}")
        return choices[name]

    def _read_users(self, users: dict[str, str]) -> dict[str, str]:
        if not users:
            return {}
        try:
            import bcrypt
        except ModuleNotFoundError as exc:
            raise self._error("basic_auth_users needs bcrypt: pip install bcrypt") from exc
        for user, hashed in users.items():
            try:
                bcrypt.checkpw(b"", hashed.encode())
            except ValueError as exc:
                raise self._error(
                    f"basic_auth_users.{user}: not a bcrypt hash: create one with `htpasswd -nBC 10 {user}`"
                ) from exc
        return dict(users)


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as exc:
        raise WebConfigError(f"{path}: {exc}") from exc
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise WebConfigError(f"{path}: expected a mapping with tls_server_config and basic_auth_users")
    return data


def _digest(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode()).digest()


def _no_password() -> str:
    raise ValueError("the key is encrypted; it must be readable without a password")
