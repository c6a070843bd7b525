"""The attacks, in the order of the table, and how an honest client measures the exporter."""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from pathlib import Path

from tests.testbed.processes import Running

ORDER = [
    "64 clients read no answer, 24 send nothing, 8 send half a request head; all of these clients reconnect",
    "500 connections to a process that may open 128 files",
    "with TLS: 256 connections that send nothing, and 256 that only begin a handshake",
    "with TLS: 8 clients on one address and 8 on 8 addresses guess passwords",
    "8 connections of one address request `/metrics?name[]=gpu_up` without a pause",
    "an endless request head, a request with a body, a line feed in a header, an unsupported method, random bytes",
    "a source that sends one byte at a time",
    "a source with an endless answer",
    "a source with an endlessly nested answer",
    "a source that answers each query of `digest` with 200,000 rows",
    "a source that answers each query of `digest` with as many new tenants as are allowed",
    "a source that redirects to another server",
    "names with half of a surrogate pair and terminal escapes",
    "a recording for replay that unpacks to 1 GiB",
    "a state file and a device list that a user has changed",
    "a textfile directory in which every user can rename files",
    "the running exporter can start no thread, and gets signals",
    "the starting exporter can start no thread",
    "a wall clock that jumps by an hour",
    "the reconciler reads 500 pods, each with the reconciler's label and 250 kB of annotations",
    "the reconciler reads 50 pods, 40 Jobs, 50 Services, EndpointSlices and autoscalers of maximum size",
    "a collector reads 8,000 jobs with names and comments of 1 kB",
]
HOSTILE, HONEST, PROBE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
SCENARIO = "gpus: [{model: T4}, {model: H100}]\n"


def get(port: int, path: str, source: str) -> tuple[int, int]:
    """Status and size."""
    client = http.client.HTTPConnection("127.0.0.1", port, 20.0, source_address=(source, 0))
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, len(answer.read())


def probe_ms(port: int, times: int = 20) -> float:
    """The slowest of some probes."""
    slowest = 0.0
    for _ in range(times):
        began = time.monotonic()
        assert get(port, "/-/healthy", PROBE)[0] == 200
        slowest = max(slowest, time.monotonic() - began)
    return 1e3 * slowest


def rss_mib(running: Running) -> float:
    pages = int(Path(f"/proc/{running.process.pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
