"""What the daemons of some nodes say now: one reading of each, side by side, bounded in time and size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gpu_exporter.exposition.rows import Row
from gpu_exporter.fetch import MIB, FetchError, fetch_text, shorten
from gpu_exporter.outside import need_real
from gpu_exporter.plain import shorten as shorten_text
from gpu_exporter.threads import run_ahead

WITHIN_S = 5.0
WORKERS = 64
MOST_BYTES = 4 * MIB  # of a node; 64 are read at a time
ROWS_MAX = 4096  # of a node: 8 GPUs with 7 instances and dozens of holders each
TEXT_MAX = 256  # characters of a cell; longer names end in a digest
PROBLEMS_MAX = 8
MOST = 1e15  # bytes of a GPU and seconds of a holder are less
PORT = 9836
PATH = "/api/v1/status"
NUMBERS = {  # fields of Row, by the keys of docs/status.schema.json
    "utilization_ratio": "utilization",
    "memory_used_bytes": "memory_bytes",
    "power_watts": "power_w",
    "temperature_celsius": "temperature_celsius",
    "held_seconds": "held_s",
    "idle_seconds": "idle_s",
}
TEXTS = ("gpu", "name", "holder", "owner", "state", "why")


class NodeRow(NamedTuple):
    """A row of the table of one node."""

    node: str
    row: Row


class Reading(NamedTuple):
    """Of all nodes. `answered`: how many of them did; `problems`: by node, why nothing or not all is known of it."""

    rows: list[NodeRow]
    answered: int
    problems: Mapping[str, str]


def complete(text: str) -> str:
    """HOST, HOST:PORT or a URL to the address of the node's status. Raises ValueError."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not HOST, HOST:PORT or a URL")
    if parts.port is None and "://" not in text:
        url = f"{url}:{PORT}"
    return url.rstrip("/") + PATH


def name_of(url: str) -> str:
    """A node as people know it: its host, with a port that is not the usual one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return host if parts.port in (None, PORT) else f"{host}:{parts.port}"


class Answer(NamedTuple):
    """Of one node: its rows, None where it did not answer, and what is wrong, "" for nothing."""

    rows: list[Row] | None
    problem: str = ""


def read_each(urls: Sequence[str], fetch: Callable[..., str] = fetch_text) -> Iterator[tuple[str, Answer]]:
    """One reading of each, as they come. A node that does not answer costs no other its rows. Raises NoThread."""

    def read(url: str) -> tuple[str, Answer]:
        try:
            return url, Answer(*parse(fetch(url, most_bytes=MOST_BYTES, within_s=WITHIN_S)))
        except FetchError as exc:
            hint = "; ask by its address, or give its exporter this name by --web.hosts" if exc.status == 421 else ""
            return url, Answer(None, f"{exc}{hint}")
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
            return url, Answer(None, f"{shorten(url)}: not the status of a gpu-exporter ({type(exc).__name__})")

    yield from run_ahead(read, urls, min(WORKERS, len(urls)), "top")


def put_together(urls: Sequence[str], answers: Mapping[str, Answer]) -> Reading:
    """What is known of these nodes, in their order."""
    rows = [NodeRow(name_of(url), row) for url in urls if url in answers for row in answers[url].rows or ()]
    problems = {name_of(url): answers[url].problem if url in answers else "is asked" for url in urls}
    answered = sum(answer.rows is not None for answer in answers.values())
    return Reading(rows, answered, {node: problem for node, problem in problems.items() if problem})


def read_nodes(urls: Sequence[str], fetch: Callable[..., str] = fetch_text) -> Reading:
    """One reading of all. Raises NoThread."""
    return put_together(urls, dict(read_each(urls, fetch)))


def _number(value: Any) -> float | None:
    """Raises ValueError for what no clock or meter can show, which would break the screen of all nodes."""
    if value is None:
        return None
    number = need_real(value)
    if not 0.0 <= number <= MOST:
        raise ValueError
    return number


def _text(value: Any) -> str:
    """Every row of the table is as wide as the widest."""
    return shorten_text(str(value), TEXT_MAX)


def parse(text: str) -> tuple[list[Row], str]:
    """The rows of an answer, and what its exporter itself misses. Raises what a strange answer causes."""
    answer: Any = json.loads(text)
    rows = []
    for each in answer["rows"]:
        numbers = {field: _number(each[key]) for key, field in NUMBERS.items()}
        rows.append(Row(**{key: _text(each[key]) for key in TEXTS}, **numbers))  # type: ignore[arg-type]
        if len(rows) > ROWS_MAX:
            raise ValueError
    missing = [_text(answer["driver_error"])] if not answer["driver_up"] else []
    missing += [
        f"{_text(source['source'])}: {_text(source['error'])}" for source in answer["attribution"] if source["error"]
    ]
    return rows, "; ".join(filter(None, missing[:PROBLEMS_MAX]))
