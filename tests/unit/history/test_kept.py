"""Answers in a folder: only for the same server, tenant and query, and for no other user of the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.testbed.pki import Authority

from gpu_exporter.cli.reconciler_flags import build_client
from gpu_exporter.cli.reports.report import build_parser
from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.history.kept import Folder

URL = "http://prometheus:9090"
Digest = Callable[..., str]


@pytest.fixture
def tenant() -> Digest:
    """The digest of these flags."""

    def digest(*flags: str, url: str = URL) -> str:
        address = parse_address(url)
        return build_client(build_parser().read(list(flags)), address).tenant(address)

    return digest


def test_all_that_chooses_the_tenant_of_a_server_chooses_the_answers(tenant: Digest, tmp_path: Path) -> None:
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    one, two = (Authority(tmp_path / name).issue("client", "client") for name in ("a", "b"))
    org, basic = "--source.header", ("--source.basic-auth.password-file", file("password", "x"))
    digests = [
        tenant(),
        tenant(org, "X-Scope-OrgID: a"),
        tenant(org, "X-Scope-OrgID: b"),
        tenant(org, "X-Other: a"),
        tenant("--source.header-file", file("one", "X-Scope-OrgID: c")),
        tenant("--source.header-file", file("one", "X-Scope-OrgID: d")),
        tenant("--source.bearer-token-file", file("token-a", "t")),
        tenant("--source.bearer-token-file", file("token-b", "t")),
        tenant("--source.basic-auth.username", "a", *basic),
        tenant("--source.basic-auth.username", "b", *basic),
        tenant(url="http://a:secret@prometheus:9090"),
        tenant(url="http://b:secret@prometheus:9090"),
        tenant(url=f"{URL}/?tenant=a"),
        *(tenant("--source.tls.cert", str(cert), "--source.tls.key", str(key)) for cert, key in (one, two)),
    ]
    assert len(set(digests)) == len(digests)
    assert not any("secret" in digest for digest in digests)


def test_a_new_token_or_password_of_the_same_tenant_finds_its_answers(tenant: Digest, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    before = tenant("--source.bearer-token-file", str(token))
    token.write_text("two")
    assert tenant("--source.bearer-token-file", str(token)) == before
    assert tenant(url="http://a:old@prometheus:9090") == tenant(url="http://a:new@prometheus:9090")
    assert tenant("--source.header", "X-Scope-OrgID: a") == tenant("--source.header", "x-scope-orgid: a")


def held(path: Path, tenant: str, gpu: str) -> str:
    """The GPU in the answer for this tenant, from the folder or from a server that shows `gpu`."""
    row = {"metric": {"UUID": gpu}, "values": [[10, "1"]]}
    text = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [row, 7]}})
    history = History(parse_address(URL), lambda *_: text, Folder(path, tenant), clock=ManualClock())
    ((labels, _),) = history.ask_now("held", "up", 10.0)
    assert history.skipped == 1, "also in an answer that was kept"
    return dict(labels)["UUID"]


def test_a_tenant_gets_no_answer_of_another_one(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    assert [held(path, *each) for each in (("a", "of-a"), ("b", "of-b"), ("a", "new"), ("b", "new"))] == [
        "of-a",
        "of-b",
        "of-a",
        "of-b",
    ]
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o710, 0o701, 0o770, 0o777])
def test_a_folder_that_others_can_open_is_refused_and_stays_as_it_is(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=rf"other users can open it \(mode {mode:04o}\): chmod go=") as raised:
        Folder(tmp_path)
    assert (raised.value.filename, tmp_path.stat().st_mode & 0o777) == (str(tmp_path), mode)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        Folder(tmp_path)
