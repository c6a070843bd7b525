"""Tokens, passwords and headers for the source of evidence."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.promql import client as fetch
from gpu_exporter.common.promql.client import Client, Credentials


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    return path


FORM = "--source.header: write a header as 'Name: value', such as 'X-Scope-OrgID: team-a'"


def test_the_token_file_is_read_for_each_request(secret: Path) -> None:
    credentials = Credentials(secret, headers=["X-Scope-OrgID: team-a"])
    assert credentials.headers() == {"X-Scope-OrgID": "team-a", "Authorization": "Bearer s3cret"}
    secret.write_text("rotated")
    assert credentials.headers()["Authorization"] == "Bearer rotated"


def test_a_password_may_contain_anything_but_a_line_break_at_its_end(secret: Path) -> None:
    secret.write_text(" pass:word ä \r\n", "utf-8")
    header = Credentials(None, "prometheus", secret).headers()["Authorization"]
    assert base64.b64decode(header.removeprefix("Basic ")).decode() == "prometheus: pass:word ä "


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("s3cret", FORM),
        ("A: s3cret\r\nHost: other", FORM),
        ("A s3cret: c", FORM),
        ("A:", FORM),
        (
            "authorization: Bearer s3cret",
            "--source.header: authorization: use --source.bearer-token-file or --source.basic-auth.*",
        ),
        ("Host: other", "--source.header: Host: the reconciler sets this header itself"),
    ],
)
def test_a_header_that_would_break_the_request_is_refused(header: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="--source.header") as caught:
        Credentials(headers=[header])
    assert str(caught.value) == complaint
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file or directory"),
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"\xff", "it is not UTF-8"),
        (b"x" * (64 * 1024 + 1), "it is longer than 65536 bytes"),
        (b"two words", "a token must be one word of printable ASCII"),
        (b"a\nb", "a token must be one word of printable ASCII"),
    ],
)
def test_an_unusable_token_is_an_error_at_the_start_and_later(
    secret: Path, content: bytes | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(credentials=Credentials(secret))
    if content is None:
        secret.unlink()
    else:
        secret.write_bytes(content)
    with pytest.raises(ValueError, match="--source.bearer-token-file") as caught:
        Credentials(secret)
    assert str(caught.value) == f"--source.bearer-token-file {secret}: {complaint}"
    monkeypatch.setattr(fetch, "fetch_text", lambda *arguments: pytest.fail("asked without its token"))
    with pytest.raises(AnswerError, match=complaint):
        client(parse_address("http://127.0.0.1:1/"))


@pytest.mark.parametrize(
    ("user", "has_password", "has_token", "complaint"),
    [
        ("a", False, False, "together"),
        ("", True, False, "together"),
        ("a", True, True, "either --source.bearer-token-file or"),
        ("a:b", True, False, "must not contain a colon"),
    ],
)
def test_incomplete_and_contradictory_credentials_are_refused(
    secret: Path, user: str, has_password: bool, has_token: bool, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Credentials(secret if has_token else None, user, secret if has_password else None)


def test_a_user_in_the_address_is_refused_if_other_credentials_are_set(secret: Path) -> None:
    for credentials in (Credentials(secret), Credentials(None, "a", secret)):
        credentials.check_address(parse_address("https://host:9090"))
        with pytest.raises(ValueError, match="remove one"):
            credentials.check_address(parse_address("https://user:password@host:9090"))
    Credentials().check_address(parse_address("https://user:password@host:9090"))
