"""Reads the status of several nodes: one reading from each daemon, in parallel, with limits on time and size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB, FetchError, fetch_text
from gpu_exporter.common.model.rows import Row, join_rows
from gpu_exporter.common.outside import need_real
from gpu_exporter.common.plain import one_line, shorten
from gpu_exporter.common.slurm.hostlist import render_names
from gpu_exporter.common.threads import run_ahead
from gpu_exporter.common.version import VERSION

WITHIN_S = 5.0
WORKERS = 64
MOST_BYTES = 4 * MIB  # per node; 64 nodes are read at a time
ROWS_MAX = 4096  # per node: 8 GPUs with 7 instances and dozens of holders each
TEXT_MAX = 256  # characters of a cell; longer names end in a digest
SENTENCE_MAX = 1024  # characters of a reason or an advice
PROBLEMS_MAX = 8
MOST = 1e15  # bytes of a GPU and seconds of a holder are always less
PORT = 9836
PATH = "/api/v1/status"
HINTS: dict[int | None, str] = {  # remedies, by HTTP status; `flags` is the section of a command's flags
    401: "; it requires a password: set --{flags}.basic-auth.username and --{flags}.basic-auth.password-file",
    421: "; use its IP address, or add this name to --web.hosts of its exporter",
}
NUMBERS = {  # fields of Row, by their keys in JSON
    "utilization_ratio": "utilization",
    "memory_used_bytes": "memory_bytes",
    "power_watts": "power_w",
    "temperature_celsius": "temperature_celsius",
    "held_seconds": "held_s",
    "idle_seconds": "idle_s",
    "stalled_seconds": "stalled_s",
}
ODD = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)  # of parsing foreign JSON
TEXTS = ("gpu", "name", "holder", "owner", "state", "cause")
SENTENCES = ("why", "advice")
T = TypeVar("T")


class NodeRow(NamedTuple):
    """One row of a node's table."""

    node: str
    row: Row


class ClusterReading(NamedTuple):
    """The combined result of all nodes. `answered`: number of answers. `problems`: why data is missing, by node."""

    rows: list[NodeRow]
    answered: int
    problems: Mapping[str, str]


def parse_node(text: str) -> Address:
    """Returns the address of a node's status page, from HOST, HOST:PORT or a URL. Raises ValueError."""
    address = parse_address(text, scheme="http")
    if address.port is None and "://" not in text:
        address = parse_address(f"{text}:{PORT}", scheme="http")
    return address.page(PATH)


def name_of(address: Address) -> str:
    """Returns the displayed name of a node: its host, with the port if it is not the default port."""
    return address.host if address.port in (None, PORT) else f"{address.host}:{address.port}"


class NodeAnswer(NamedTuple):
    """The result for one node. `rows`: None if the node gave no answer. `problem`: "" without a problem."""

    rows: list[Row] | None
    problem: str = ""


def read_status(
    node: Address, fetch: Callable[..., str], parse: Callable[[str], T], flags: str
) -> tuple[T | None, str]:
    """Reads the status of a node. Returns the parsed status, or None and the reason. `parse` may raise any of ODD.
    `flags`: as in HINTS.
    """
    try:
        return parse(fetch(node, most_bytes=MOST_BYTES, within_s=WITHIN_S)), ""
    except AnswerError as exc:
        hint = HINTS.get(exc.status, "") if isinstance(exc, FetchError) else ""
        return None, f"{str(exc).removeprefix(f'{node}: ')}{hint.format(flags=flags)}"
    except ODD as exc:
        return None, f"the answer is not the status of a gpu-exporter ({type(exc).__name__})"


def read_each(nodes: Sequence[Address], fetch: Callable[..., str] = fetch_text) -> Iterator[tuple[Address, NodeAnswer]]:
    """Yields a reading of each node, in order of arrival. A silent node does not affect the others. Raises NoThread."""

    def read(node: Address) -> tuple[Address, NodeAnswer]:
        found, problem = read_status(node, fetch, parse, "from")
        return node, NodeAnswer(None, problem) if found is None else NodeAnswer(*found)

    yield from run_ahead(read, nodes, min(WORKERS, len(nodes)), "top")


def put_together(nodes: Sequence[Address], answers: Mapping[Address, NodeAnswer]) -> ClusterReading:
    """Combines the results of these nodes, in their order."""
    rows = [NodeRow(name_of(node), row) for node in nodes if node in answers for row in answers[node].rows or ()]
    problems = {name_of(node): answers[node].problem if node in answers else "no answer yet" for node in nodes}
    answered = sum(answer.rows is not None for answer in answers.values())
    return ClusterReading(rows, answered, {node: problem for node, problem in problems.items() if problem})


def list_problems(reading: ClusterReading) -> list[str]:
    """Returns one line for each problem with the nodes that have it, e.g. `gpu-[01-40]: Connection refused`."""
    nodes: dict[str, list[str]] = {}
    for node, problem in reading.problems.items():
        nodes.setdefault(problem, []).append(node)
    return [one_line(f"{render_names(names)}: {problem}") for problem, names in nodes.items()]


def read_nodes(nodes: Sequence[Address], fetch: Callable[..., str] = fetch_text) -> ClusterReading:
    """Reads all nodes once. Raises NoThread."""
    return put_together(nodes, dict(read_each(nodes, fetch)))


def render_json(nodes: Sequence[Address], reading: ClusterReading, rows: Sequence[NodeRow]) -> str:
    """Renders JSON: `rows` with all numbers and texts, and each node with its problem, "" without one."""
    facts = [
        {"node": each.node}
        | {key: getattr(each.row, key) for key in (*TEXTS, *SENTENCES)}
        | {key: getattr(each.row, field) for key, field in NUMBERS.items()}
        for each in rows
    ]
    asked = [{"node": name, "problem": reading.problems.get(name, "")} for name in map(name_of, nodes)]
    return json.dumps({"nodes": asked, "rows": facts}, indent=1) + "\n"


def _number(value: Any) -> float | None:
    """Parses a number or None. Raises ValueError for impossible numbers, which would break the whole screen."""
    if value is None:
        return None
    number = need_real(value)
    if not 0.0 <= number <= MOST:
        raise ValueError
    return number


def _text(value: Any, most: int = TEXT_MAX) -> str:
    """Parses one line of at most `most` characters. A longer text would widen every row of the table."""
    return one_line(str(value), most)


def _shorten(value: Any) -> Any:
    """Shortens all texts in a JSON value, because every row of a GPU repeats them."""
    if isinstance(value, str):
        return shorten(value, SENTENCE_MAX)
    if isinstance(value, list):
        return [_shorten(each) for each in value]
    return {key: _shorten(each) for key, each in value.items()} if isinstance(value, dict) else value


def parse(text: str) -> tuple[list[Row], str]:
    """Parses an answer. Returns its rows, and the problems that the exporter reports. Raises various exceptions for a
    malformed answer.
    """
    answer: Any = json.loads(text)
    try:
        return _read_rows(answer), _list_missing(answer)
    except KeyError as exc:
        if "version" not in answer:
            raise
        raise AnswerError(
            f"the answer of gpu-exporter {_text(answer['version'])} lacks the field {exc}, but this gpu-exporter "
            f"{VERSION} needs it: update the older of the two"
        ) from exc


def _read_rows(answer: Any) -> list[Row]:
    rows = []
    gpus = _shorten(answer["gpus"])
    for gpu in gpus:
        del gpu["conditions"][PROBLEMS_MAX:]
    for row in join_rows({**answer, "gpus": gpus}):
        numbers = {field: _number(getattr(row, field)) for field in NUMBERS.values()}
        texts = {key: _text(getattr(row, key)) for key in TEXTS}
        sentences = {key: _text(getattr(row, key), SENTENCE_MAX) for key in SENTENCES}
        rows.append(Row(**texts, **sentences, **numbers))  # type: ignore[arg-type]
        if len(rows) > ROWS_MAX:
            raise ValueError
    return rows


def _list_missing(answer: Any) -> str:
    missing = [_text(answer["driver_error"])] if not answer["driver_up"] else []
    missing += [
        f"{_text(source['source'])}: {_text(source['error'])}" for source in answer["attribution"] if source["error"]
    ]
    return "; ".join(filter(None, missing[:PROBLEMS_MAX]))
