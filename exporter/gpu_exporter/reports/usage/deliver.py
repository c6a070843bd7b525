"""Delivers a report: to standard output, to a file, or by mail through the site's relay."""

from __future__ import annotations

import re
import sys
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.files import write_atomically
from gpu_exporter.common.plain import encodable, percent, utc
from gpu_exporter.reports.usage.model import IDLE, UsageReport
from gpu_exporter.reports.usage.render.forms import FORMS
from gpu_exporter.reports.usage.render.view import ReportView, number

PART = 2**20  # characters that are encoded at once: all holders of a week have 17 MB
ANSWER_S = 60.0  # for each answer of the mail server
MAILBOX = re.compile(r"[!-;=?-~]+@[0-9A-Za-z.-]+")  # RFC 5321, 4.1.2, without spaces, < and >
RELAY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::([0-9]{1,5}))?")
SMTP_PORT = 25


class Mail(NamedTuple):
    """The route of a mail: a relay that accepts mail without a login. TLS is used if the relay offers it."""

    host: str
    port: int
    sender: str
    receivers: tuple[str, ...]


def parse_relay(text: str) -> tuple[str, int]:
    """Parses HOST or HOST:PORT. Raises ValueError."""
    found = RELAY.fullmatch(text)
    port = int(found[2] or SMTP_PORT) if found else 0
    if found is None or not 0 < port < 2**16:
        raise ValueError(f"{text!r} is not HOST or HOST:PORT of a mail server")
    return found[1].strip("[]"), port


def parse_mailbox(text: str) -> str:
    """Accepts a plain mail address. Raises ValueError."""
    if MAILBOX.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a mail address such as gpu-report@example.org")
    return text


def deliver(
    report: UsageReport, view: ReportView, form: str, output: Path | None = None, mail: Mail | None = None
) -> None:
    """Writes the report to `output`, and mails it. Prints it if neither is requested. Raises OSError."""
    if output is not None or mail is None:
        put(FORMS[form](report, view), output)
    if mail is not None:
        _send(mail, build_mail(report, view, mail))


def put(text: str, output: Path | None) -> None:
    """Writes a report to a file, or prints it. Raises OSError."""
    if output is None:
        for at in range(0, len(text), PART):
            sys.stdout.write(text[at : at + PART])
    else:
        write_atomically(output, encodable(text).encode())


def build_mail(report: UsageReport, view: ReportView, mail: Mail) -> EmailMessage:
    """Makes a mail with the report as text and as HTML."""
    message = EmailMessage()
    message["Subject"] = subject(report)
    message["From"], message["To"] = mail.sender, ", ".join(mail.receivers)
    message["Date"] = format_datetime(utc(report.end))
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no program answers
    message.set_content(encodable(FORMS["text"](report, view)), cte="quoted-printable")
    message.add_alternative(encodable(FORMS["mail"](report, view)), subtype="html", cte="quoted-printable")
    return message


def subject(report: UsageReport) -> str:
    """Returns the result in one line, with numbers only."""
    total = report.total
    day = utc(report.end).strftime("%Y-%m-%d")
    ratio = total.share(IDLE)
    idle = (
        f"{number(total.held)} GPU-hours held"
        if ratio is None
        else f"{percent(ratio)} of {number(total.held)} GPU-hours idle"
    )
    return f"GPU use until {day}: {idle}"


def _send(mail: Mail, message: EmailMessage) -> None:
    import smtplib  # only a mail needs it

    try:
        with smtplib.SMTP(mail.host, mail.port, timeout=ANSWER_S) as server:
            server.ehlo()
            if server.has_extn("starttls"):
                server.starttls()  # not verified, because the mail would otherwise go without TLS (RFC 7435)
            refused = server.send_message(message, mail.sender, list(mail.receivers))
    except smtplib.SMTPException as exc:
        raise OSError(f"mail to {mail.host}:{mail.port}: {exc}") from exc
    except OSError as exc:
        raise OSError(f"mail to {mail.host}:{mail.port}: {exc.strerror or exc}") from exc
    if refused:
        raise OSError(f"mail to {mail.host}:{mail.port}: refused for {', '.join(sorted(refused))}")
