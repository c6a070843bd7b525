"""Log lines as logfmt or JSON, written to standard error."""

from __future__ import annotations

import json
import logging
import sys

from gpu_exporter.common.plain import shorten, utc

PART_MAX = 16384  # characters of a message or a traceback, which may contain text of others
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class LogfmtFormatter(logging.Formatter):
    """Formats a record as `ts=... level=info logger=... msg="..."`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = _parts(record)
        return " ".join(f"{key}={_quote(value)}" for key, value in parts.items())


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_parts(record))


def _parts(record: logging.LogRecord) -> dict[str, str]:
    when = utc(record.created)
    parts = {
        "ts": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name.removeprefix("gpu_exporter."),
        "msg": shorten(record.getMessage(), PART_MAX),
    }
    if record.exc_info:
        parts["exception"] = shorten(logging.Formatter().formatException(record.exc_info), PART_MAX)
    return parts


def _quote(value: str) -> str:
    if value and value.isprintable() and not any(c in value for c in ' "=\\'):
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())  # names may contain terminal escapes


def set_up_logging(level: str, form: str) -> None:
    """Sends all log lines of the program to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
