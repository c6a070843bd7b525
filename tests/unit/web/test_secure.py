"""The file with the security settings of a port: no setting is silently ignored."""

from __future__ import annotations

import base64
import os
import ssl
from pathlib import Path

import bcrypt
import pytest
from tests.testbed.pki import Authority

from gpu_exporter.common.web.secure import TRIED_MAX, Security
from gpu_exporter.common.web.settings import WebConfigError

HASH = bcrypt.hashpw(b"pass:word", b"$2b$04$" + b"." * 22).decode()  # part of a test's id, so without chance


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    Authority(tmp_path).issue("server", "agent")
    return tmp_path


def load(directory: Path, text: str) -> Security:
    path = directory / "web.yaml"
    path.write_text(text)
    return Security(path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("http_server_config: {http2: true}", "http_server_config is not supported; known: tls_server_config"),
        (
            "tls_server_config: {cert_file: a, key_file: b, cipher_suites: c}",
            "tls_server_config.cipher_suites is not sup",
        ),
        ("tls_server_config: {cert_file: server.crt}", "cert_file and key_file are required"),
        ("tls_server_config: {cert_file: server.crt, key_file: ca.key}", "server.crt.*: .*mismatch"),
        ("tls_server_config: {cert_file: gone.crt, key_file: server.key}", "gone.crt.*No such file"),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, min_version: TLS10}",
            "'TLS10' is not supported",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_auth_type: RequireAnyClientCert}",
            "'RequireAnyClientCert' is not supported; known: NoClientCert, VerifyClientCertIfGiven",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_auth_type: RequireAndVerifyClientCert}",
            "client_ca_file is required if client_auth_type verifies clients, and invalid otherwise",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt}",
            "client_ca_file is required if client_auth_type verifies clients, and invalid otherwise",
        ),
        (
            "basic_auth_users: {ada: plain}",
            "basic_auth_users.ada: not a bcrypt hash: create one with `htpasswd -nBC 10 ada`",
        ),
        ("basic_auth_users: [ada]", "basic_auth_users: expected a mapping of names to strings"),
        ("basic_auth_users: {ada: 7}", "basic_auth_users: expected a mapping of names to strings"),
        ("[]", "expected a mapping with tls_server_config and basic_auth_users"),
        ("{", "web.yaml"),
        ("[" * 5000, "web.yaml"),
        ("", "it has no content: write {} for a port without TLS and without passwords"),
        ("---\n# all gone\n", "it has no content"),
        ("basic_auth_users:", "basic_auth_users has no value: complete the file, or remove basic_auth_users"),
        ("tls_server_config:\nbasic_auth_users: {ada: x}", "tls_server_config has no value"),
        ('tls_server_config: {cert_file: "a\\0b", key_file: server.key}', "cert_file: 'a.x00b': embedded null byte"),
        ("tls_server_config: {cert_file: /dev/zero, key_file: server.key}", "cert_file: '/dev/zero': it is not a reg"),
        ("tls_server_config: {cert_file: ., key_file: server.key}", "cert_file: '.': it is not a regular file"),
        ("tls_server_config: {cert_file: fifo, key_file: server.key}", "cert_file: 'fifo': it is not a regular file"),
        ("tls_server_config: {cert_file: large, key_file: server.key}", "cert_file: 'large': it is longer than"),
        ("tls_server_config: {cert_file: free, key_file: server.key}", "cert_file: 'free': every user can write to it"),
        ("{? {a: b} : c}", "web.yaml"),
        ("basic_auth_users: 2001-99-99", "web.yaml"),
    ],
)
def test_an_invalid_or_unsupported_setting_is_named(pki: Path, text: str, fault: str) -> None:
    os.mkfifo(pki / "fifo")
    (pki / "large").touch()
    os.truncate(pki / "large", 3 << 30)
    (pki / "free").touch()
    (pki / "free").chmod(0o666)
    with pytest.raises(WebConfigError, match=f"web.yaml.*{fault}" if "web.yaml" not in fault else fault):
        load(pki, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match="gone.yaml"):
        Security(tmp_path / "gone.yaml")


def test_an_empty_mapping_secures_nothing(tmp_path: Path) -> None:
    security = load(tmp_path, "{}")
    assert (security.context, security.wants_password) == (None, False)


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        (basic("ada:pass:word"), True),
        (basic("ada:pass:word").replace("Basic", "basic"), True),
        (basic("ada:pass:wort"), False),
        (basic("ada:"), False),
        (basic("eve:pass:word"), False),
        (basic("eve:xxxxxxxxxxxxxxxxxxxx"), False),
        (basic("ada"), False),
        (basic("ada:\0"), False),
        ("Bearer abc", False),
        ("Basic ###", False),
        ("Basic", False),
        ("", False),
        ("Basic \u00e9", False),
    ],
)
def test_only_a_known_user_with_the_correct_password_is_admitted(tmp_path: Path, given: str, admitted: bool) -> None:
    security = load(tmp_path, f"basic_auth_users: {{ada: {HASH}}}")
    assert security.wants_password
    assert not security.recall(given)
    assert security.admits(given) is admitted
    assert security.recall(given) is admitted


def test_the_number_of_remembered_passwords_is_limited(tmp_path: Path) -> None:
    users = {f"u{i}": HASH for i in range(TRIED_MAX + 1)}
    security = load(tmp_path, f"basic_auth_users: {users}")
    for user in users:
        assert security.admits(basic(f"{user}:pass:word"))
    assert security.recall(basic("u0:pass:word")) is None
    assert security.recall(basic("u1:pass:word")) is True
    for number in range(TRIED_MAX + 1):
        assert not security.admits(basic(f"u1:{number}"))
    assert security.recall(basic("u1:0")) is None
    assert security.recall(basic("u1:1")) is False
    assert security.recall(basic("u1:pass:word")) is True, "wrong passwords displace no correct one"


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("{}", True),
        ("tls_server_config: {cert_file: server.crt, key_file: server.key}", True),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, "
            "client_auth_type: VerifyClientCertIfGiven}",
            True,
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, "
            "client_auth_type: RequireAndVerifyClientCert}",
            False,
        ),
        (f"basic_auth_users: {{ada: {HASH}}}", False),
        ("basic_auth_users: {}", True),
    ],
)
def test_a_port_is_open_without_a_password_or_a_required_certificate(pki: Path, text: str, is_open: bool) -> None:
    assert load(pki, text).is_open is is_open


@pytest.mark.parametrize(
    ("name", "mode"),
    [("VerifyClientCertIfGiven", ssl.CERT_OPTIONAL), ("RequireAndVerifyClientCert", ssl.CERT_REQUIRED)],
)
def test_client_certificates_are_requested_as_configured(pki: Path, name: str, mode: ssl.VerifyMode) -> None:
    text = (
        "tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: %s}"
    )
    context = load(pki, text % name).context
    assert context is not None
    assert context.verify_mode is mode
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
