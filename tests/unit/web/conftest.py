"""A web server over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.web.server_bench import Site

from gpu_exporter.common.web.server import HttpServer


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.go_on.set()


@pytest.fixture
def server(site: Site) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    yield server
    server.stop()
