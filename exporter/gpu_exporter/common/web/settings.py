"""The file with the TLS and password settings of a port, in the format of Prometheus's own exporters.

Format: github.com/prometheus/exporter-toolkit, docs/web-configuration.md. An unsupported setting is an error: without
it, the port would be less protected than the file requires. An interrupted program may leave a file without its last
part. So a change of the file never reduces the protection of a port in use.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.common.files import read_named
from gpu_exporter.common.plain import describe_yaml

FILE_MAX = 2**20  # bytes: no Secret has more
TLS, USERS = "tls_server_config", "basic_auth_users"
FILE_KEYS = ("cert_file", "key_file", "client_ca_file")
TLS_KEYS = (*FILE_KEYS, "client_auth_type", "min_version", "max_version")
CLIENTS = {  # from the least strict to the strictest
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class WebConfigError(ValueError):
    """The web configuration is invalid. The text names the file, the key and the remedy."""


class WebSettings(NamedTuple):
    """The settings of a port, from one reading of its files.

    `tls`, `users`: the sections. `named`: by key, the content of the files that `tls` names. `kept`: the keys whose
    former setting remains in force, because the new setting protects less. `digest`: digest of the content of all
    files.
    """

    tls: Mapping[str, str]
    users: Mapping[str, str]
    named: Mapping[str, bytes]
    kept: tuple[str, ...]
    digest: str


def read_settings(path: Path, before: WebSettings | None = None) -> WebSettings:
    """Reads the file and the files that it names. `before`: the settings in use. Raises WebConfigError."""
    data = _read(path, str(path))
    sections = _parse(path, data)
    kept: list[str] = []
    tls, users = sections[TLS], sections[USERS]
    _check_tls(path, tls)
    if before is not None and before.users and not users:
        users, kept = before.users, [USERS]
    if before is not None and before.tls and not tls:
        tls, kept = before.tls, [TLS, *kept]
        try:
            named = _read_named(path, tls)
        except WebConfigError:  # the certificates are gone together with their section
            named = dict(before.named)
    else:
        named = _read_named(path, tls)
        if before is not None and strictness(tls) < strictness(before.tls):
            tls = {**tls, **{key: before.tls[key] for key in ("client_auth_type", "client_ca_file")}}
            named["client_ca_file"] = before.named["client_ca_file"]
            kept = [f"{TLS}.client_auth_type", *kept]
    digest = hashlib.sha256(data)
    for key, content in named.items():
        digest.update(b"\0%s %d\0%s" % (key.encode(), len(content), content))
    return WebSettings(tls, users, named, tuple(kept), digest.hexdigest())


def strictness(tls: Mapping[str, str]) -> int:
    """Returns the strictness of the client authentication: the position of this setting in CLIENTS."""
    return list(CLIENTS).index(tls.get("client_auth_type") or "NoClientCert")


def _read_named(path: Path, tls: Mapping[str, str]) -> dict[str, bytes]:
    names = {key: tls[key] for key in FILE_KEYS if tls.get(key)}
    return {key: _read(path.parent / name, f"{path}: {TLS}.{key}: {name!r}") for key, name in names.items()}


def _read(path: Path, title: str) -> bytes:
    try:
        return read_named(path, FILE_MAX)
    except OSError as exc:
        raise WebConfigError(f"{title}: {exc.strerror}") from exc
    except ValueError as exc:  # a NUL in the name
        raise WebConfigError(f"{title}: {exc}") from exc


@lru_cache(maxsize=1)  # it is parsed again only after a change
def _parse(path: Path, data: bytes) -> Mapping[str, Mapping[str, str]]:
    import yaml

    try:
        found = yaml.safe_load(data.decode("utf-8"))
    except (ValueError, TypeError, yaml.YAMLError, RecursionError) as exc:
        raise WebConfigError(f"{path}: {describe_yaml(exc)}") from exc
    if found is None:
        raise WebConfigError(f"{path}: it has no content: write {{}} for a port without TLS and without passwords")
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise WebConfigError(f"{path}: expected a mapping with {TLS} and {USERS}")
    if unknown := sorted(set(found) - {TLS, USERS}):
        raise WebConfigError(f"{path}: {unknown[0]} is not supported; known: {TLS}, {USERS}")
    return {key: _check_section(path, key, found.get(key, {})) for key in (TLS, USERS)}


def _check_section(path: Path, key: str, value: Any) -> dict[str, str]:
    if value is None:
        raise WebConfigError(f"{path}: {key} has no value: complete the file, or remove {key}")
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise WebConfigError(f"{path}: {key}: expected a mapping of names to strings")
    return value


def _check_tls(path: Path, tls: Mapping[str, str]) -> None:
    if not tls:
        return
    if unknown := sorted(set(tls) - set(TLS_KEYS)):
        raise WebConfigError(f"{path}: {TLS}.{unknown[0]} is not supported; known: {', '.join(TLS_KEYS)}")
    if not (tls.get("cert_file") and tls.get("key_file")):
        raise WebConfigError(f"{path}: {TLS}: cert_file and key_file are required")
    choices: tuple[tuple[str, Mapping[str, Any]], ...]
    choices = (("client_auth_type", CLIENTS), ("min_version", VERSIONS), ("max_version", VERSIONS))
    for key, known in choices:
        if (name := tls.get(key)) and name not in known:
            raise WebConfigError(f"{path}: {TLS}.{key}: {name!r} is not supported; known: {', '.join(known)}")
    if (strictness(tls) == 0) == bool(tls.get("client_ca_file")):
        raise WebConfigError(
            f"{path}: {TLS}: client_ca_file is required if client_auth_type verifies clients, and invalid otherwise"
        )
