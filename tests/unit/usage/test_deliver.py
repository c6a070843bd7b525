"""A report in a file and in a mail, through a relay on the loopback."""

from __future__ import annotations

import email
import email.policy
import ssl
from email.message import EmailMessage
from pathlib import Path

import pytest
from tests.testbed.mail import Accepted, start_relay
from tests.testbed.pki import Authority
from tests.testbed.usage import build_report

from gpu_exporter.reports.usage.deliver import Mail, deliver, parse_mailbox, parse_relay
from gpu_exporter.reports.usage.render.forms import FORMS
from gpu_exporter.reports.usage.render.view import ReportView

TO = ("boss@example.org", "ops@example.org")
VIEW = ReportView()


def send(port: int) -> None:
    deliver(build_report(), VIEW, "text", mail=Mail("127.0.0.1", port, "gpus@example.org", TO))


def read(mail: Accepted) -> EmailMessage:
    return email.message_from_bytes(mail.text, policy=email.policy.default)  # type: ignore[return-value]


def test_a_mail_has_the_report_as_text_and_as_html_and_its_result_in_the_subject(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with start_relay() as relay:
        send(relay.port)
    (mail,) = relay.accepted
    message = read(mail)
    assert (mail.sender, mail.receivers, mail.is_secret) == ("gpus@example.org", TO, False)
    assert message["Subject"] == "GPU use until 2026-11-30: 20% of 10,988 GPU-hours idle"
    assert (message["From"], message["To"]) == ("gpus@example.org", "boss@example.org, ops@example.org")
    assert message["Auto-Submitted"] == "auto-generated"
    text, page = (message.get_body((kind,)) for kind in ("plain", "html"))
    assert text is not None and page is not None
    assert text.get_content().replace("\r\n", "\n") == FORMS["text"](build_report(), VIEW)
    assert page.get_content().replace("\r\n", "\n") == FORMS["mail"](build_report(), VIEW)
    assert capsys.readouterr().out == "", "the mail is the output"


def test_a_mail_goes_over_tls_if_the_relay_offers_it_whoever_signed_its_certificate(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path).issue("relay", "relay"))
    with start_relay(context) as relay:
        send(relay.port)
    assert [mail.is_secret for mail in relay.accepted] == [True]


def test_a_receiver_that_the_relay_refuses_is_named_and_the_other_gets_the_mail() -> None:
    with (
        start_relay(refused=frozenset([TO[0]])) as relay,
        pytest.raises(OSError, match=r"mail to 127.0.0.1:[0-9]+: refused for boss@example.org"),
    ):
        send(relay.port)
    assert [mail.receivers for mail in relay.accepted] == [(TO[1],)]


def test_an_unreachable_relay_is_named() -> None:
    with start_relay() as relay:
        port = relay.port
    with pytest.raises(OSError, match=rf"mail to 127.0.0.1:{port}: Connection refused"):
        send(port)


def test_a_file_is_written_whole_beside_a_mail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    with start_relay() as relay:
        mail = Mail("127.0.0.1", relay.port, "gpus@example.org", TO)
        deliver(build_report(), VIEW, "html", path, mail)
    assert path.read_text("utf-8") == FORMS["html"](build_report(), VIEW)
    assert len(relay.accepted) == 1 and capsys.readouterr().out == ""
    deliver(build_report(), VIEW, "csv")
    assert capsys.readouterr().out == FORMS["csv"](build_report(), VIEW)


@pytest.mark.parametrize(
    ("text", "relay"),
    [
        ("relay", ("relay", 25)),
        ("relay.example.org:587", ("relay.example.org", 587)),
        ("[::1]:2525", ("::1", 2525)),
        ("10.0.0.1", ("10.0.0.1", 25)),
    ],
)
def test_an_address_of_a_relay_has_the_port_of_smtp_unless_it_names_another(text: str, relay: tuple[str, int]) -> None:
    assert parse_relay(text) == relay


@pytest.mark.parametrize(
    "text", ["", ":25", "relay:0", "relay:65536", "relay:x", "smtp://relay", "a b", "re\nlay", "::1"]
)
def test_an_address_that_is_no_relay_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST or HOST:PORT"):
        parse_relay(text)


@pytest.mark.parametrize("text", ["", "ada", "a@", "@b", "a b@c", "Ada <a@b>", "a@b\nBcc: x@y", "a@b, c@d", "ä@b"])
def test_a_text_that_is_no_plain_mail_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a mail address"):
        parse_mailbox(text)
    assert parse_mailbox("gpu-report+x@hpc.example.org") == "gpu-report+x@hpc.example.org"
