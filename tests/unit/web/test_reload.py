"""A port in use loses no protection, whatever a writer leaves of its file, and everything else of a new file applies."""

from __future__ import annotations

import base64
import logging
import ssl
from pathlib import Path

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.pki import Authority
from tests.unit.web.server_bench import Site, get, until

from gpu_exporter.common.web import server as web
from gpu_exporter.common.web.secure import Security, WebConfig
from gpu_exporter.common.web.server import HttpServer
from gpu_exporter.common.web.settings import WebConfigError

TLS = """tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.crt
"""
CA_FIRST = TLS.replace("  client_ca_file: ca.crt\n", "").replace("  cert_file", "  client_ca_file: ca.crt\n  cert_file")
NO_CLIENTS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"


def hash_of(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


ADA, BOB, NEW = hash_of("ada's"), hash_of("bob's"), hash_of("new")
USERS = f"basic_auth_users:\n  ada: {ADA}\n  bob: {BOB}\n"
WHOLE = TLS + USERS


class Port:
    """The files of a port, and the settings that follow them."""

    def __init__(self, folder: Path, text: str = WHOLE) -> None:
        self.folder, self.path = folder, folder / "web.yaml"
        self.path.write_text(text)
        self.config = WebConfig(self.path)

    def change(self, text: str) -> bool:
        """Write the file, and look twice."""
        self.path.write_text(text)
        first = self.config.turn()
        assert not first
        return self.config.turn()

    @property
    def security(self) -> Security:
        return self.config.security

    def admits(self, user: str, password: str) -> bool:
        header = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
        return self.security.wants_password and self.security.admits(header)

    def is_protected(self) -> bool:
        """As much as WHOLE protects it."""
        context = self.security.context
        is_verified = context is not None and context.verify_mode is ssl.CERT_REQUIRED
        return is_verified and self.security.wants_password and not self.security.is_open


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    Authority(folder).issue("server", "agent")
    return folder


@pytest.fixture
def port(tmp_path: Path, pki: Path) -> Port:
    for name in ("server.crt", "server.key", "ca.crt"):
        (tmp_path / name).write_bytes((pki / name).read_bytes())
    return Port(tmp_path)


def is_documented(text: str, cut: str) -> bool:
    """Whether `cut` is a part that nobody can tell from a whole file: it ends with a line. docs/interfaces.md has it."""
    return text[len(cut) :].startswith("\n") or cut.rstrip(" ").endswith("\n")


@pytest.mark.parametrize("text", [TLS + USERS, USERS + TLS, CA_FIRST + USERS, USERS + CA_FIRST])
def test_a_file_that_is_cut_at_any_byte_opens_nothing(port: Port, text: str) -> None:
    port.change(text)
    for end in range(len(text)):
        port.path.write_text(cut := text[:end])
        try:
            fresh = Security(port.path)
        except WebConfigError:
            pass
        else:
            is_same = fresh.settings.tls == port.security.settings.tls and fresh.wants_password
            assert is_same or is_documented(text, cut), f"open after a start with {cut!r}"
        port.config.turn()
        port.config.turn()
        assert port.is_protected(), f"open after a reload of {cut!r}"
    port.change(text)
    assert port.config.problem == "" and port.admits("ada", "ada's") and port.admits("bob", "bob's")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_with_any_parts_gone_opens_nothing(pki: Path, data: st.DataObject) -> None:
    port = Port(pki)
    for _ in range(3):
        lines = data.draw(st.permutations([TLS, USERS])) if data.draw(st.booleans()) else [TLS, USERS]
        text = "".join(lines)
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, len(text)))
        port.path.write_text(text[:begin] + text[end:])
        port.config.turn()
        port.config.turn()
        assert port.is_protected()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (USERS, "tls_server_config"),
        (TLS, "basic_auth_users"),
        ("{}", "tls_server_config, basic_auth_users"),
        (TLS + "basic_auth_users: {}\n", "basic_auth_users"),
        (NO_CLIENTS + USERS, "tls_server_config.client_auth_type"),
        (NO_CLIENTS, "tls_server_config.client_auth_type, basic_auth_users"),
        (TLS.replace("RequireAndVerify", "Verify").replace("Cert\n", "CertIfGiven\n") + USERS, "client_auth_type"),
    ],
)
def test_what_would_open_the_port_is_named_once(
    port: Port, text: str, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert port.change(text)
    for _ in range(3):
        assert not port.config.turn()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"{kept} the port would be less protected" in record.getMessage() == port.config.problem
    assert port.is_protected()
    assert port.change(WHOLE)
    assert port.config.problem == ""


@pytest.mark.parametrize("lost", ["", NO_CLIENTS])
def test_everything_else_of_such_a_file_applies(port: Port, pki: Path, lost: str) -> None:
    """In a file without TLS, or without client certificates: a user is gone, another has a new hash."""
    assert port.change(f"{lost}basic_auth_users:\n  bob: {NEW}\n")
    assert not port.admits("ada", "ada's") and not port.admits("bob", "bob's") and port.admits("bob", "new")
    before = port.security.context
    Authority(port.folder / "new").issue("server", "agent")
    for name in ("server.crt", "server.key"):
        (port.folder / name).write_bytes((port.folder / "new" / name).read_bytes())
    assert not port.config.turn() and port.config.turn()
    assert port.security.context is not before and port.is_protected()
    assert port.security.settings.named["cert_file"] == (port.folder / "server.crt").read_bytes()
    assert port.security.settings.named["client_ca_file"] == (pki / "ca.crt").read_bytes()


@pytest.mark.parametrize(
    "gone", [("server.crt",), ("server.key",), ("ca.crt",), ("server.crt", "server.key", "ca.crt")]
)
def test_kept_certificates_need_no_file(port: Port, gone: tuple[str, ...]) -> None:
    """A Secret that is replaced as a whole has neither the section nor its files any more."""
    for name in gone:
        (port.folder / name).unlink()
    assert port.change(f"basic_auth_users:\n  ada: {NEW}\n")
    assert port.is_protected() and port.admits("ada", "new") and not port.admits("bob", "bob's")


def test_kept_certificates_that_no_longer_fit_are_replaced_by_the_former_ones(port: Port) -> None:
    Authority(port.folder / "new").issue("server", "agent")
    former = (port.folder / "server.crt").read_bytes()
    (port.folder / "server.crt").write_bytes((port.folder / "new" / "server.crt").read_bytes())
    assert port.change(USERS)
    assert port.is_protected() and port.security.settings.named["cert_file"] == former


def test_another_authority_for_clients_applies(port: Port) -> None:
    Authority(port.folder / "new")
    assert port.change(WHOLE.replace("ca.crt", "new/ca.crt"))
    assert port.config.problem == "" and port.is_protected()
    assert port.security.settings.named["client_ca_file"] == (port.folder / "new" / "ca.crt").read_bytes()


def test_what_a_port_never_had_can_be_absent(tmp_path: Path) -> None:
    port = Port(tmp_path, "{}\n")
    assert port.change(f"basic_auth_users:\n  ada: {ADA}\n  bob: {BOB}\n")
    assert port.change(f"basic_auth_users:\n  bob: {BOB}\n") and port.config.problem == ""
    assert port.change("{}\n") and port.config.problem and port.admits("bob", "bob's")


def test_a_change_counts_when_two_looks_have_found_the_same(port: Port) -> None:
    for number in range(5):
        port.path.write_text(f"{WHOLE}# {number}\n")
        assert not port.config.turn()
    assert port.config.turn()
    assert not port.config.turn()


@pytest.mark.parametrize(
    "fault", ["", "basic_auth_users:\n", 'tls_server_config: {cert_file: "a\\0b", key_file: c}\n', "{"]
)
def test_after_an_invalid_file_the_next_valid_one_applies(
    port: Port, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not port.change(fault)
    for _ in range(3):
        port.config.turn()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert port.config.problem.endswith("the previous certificates and passwords remain in use")
    assert port.change(f"{TLS}basic_auth_users:\n  bob: {BOB}\n")
    assert port.config.problem == "" and not port.admits("ada", "ada's") and port.admits("bob", "bob's")


def test_a_secret_that_is_swapped_as_a_whole_applies(tmp_path: Path, pki: Path) -> None:
    """As the kubelet does it: every file is a link through ..data, which is renamed to a new folder."""
    for version, users in (("..1", USERS), ("..2", f"basic_auth_users:\n  bob: {NEW}\n")):
        (tmp_path / version).mkdir()
        for name in ("server.crt", "server.key", "ca.crt"):
            (tmp_path / version / name).write_bytes((pki / name).read_bytes())
        (tmp_path / version / "web.yaml").write_text(TLS + users)
    (tmp_path / "..data").symlink_to("..1")
    for name in ("server.crt", "server.key", "ca.crt", "web.yaml"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    config = WebConfig(tmp_path / "web.yaml")
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert not config.turn() and config.turn()
    assert list(config.security.settings.users) == ["bob"] and config.problem == ""


def test_the_served_port_stays_closed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "RELOAD_S", 0.02)
    config, fresh = tmp_path / "web.yaml", tmp_path / "fresh.yaml"

    def change(text: str) -> None:
        fresh.write_text(text)
        fresh.replace(config)

    change(USERS)
    server = HttpServer("127.0.0.1:0", Site(), web_config=config)
    server.start()
    try:
        for text in ("", "basic_auth_users:\n", "{}\n"):
            assert get(server, "/page")[0] == 401
            change(text)
            until(lambda: not server.uses_web_config())
            assert get(server, "/page")[0] == 401 and not server.is_open()
            change(USERS)
            until(server.uses_web_config)
        assert [task.name for task in server.tasks] == ["web-config", "http-password"]
    finally:
        server.stop()
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 3
