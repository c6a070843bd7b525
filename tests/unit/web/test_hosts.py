"""Host names that the exporter accepts, so that no foreign page in a browser can read its page under another name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.common.web.hosts import is_expected, own_names


@pytest.fixture
def resolver(tmp_path: Path) -> Path:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 10.0.0.1\nsearch example.org lab.example.org.\n")
    return path


@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1:9836",
        "[::1]:9836",
        "::1",
        "10.1.2.3",
        "localhost:9836",
        "gpu07",
        "GPU07.example.org.:9836",
        "agent.monitoring.svc:9836",
        "agent.monitoring.svc.cluster.local",
        "gpus.example.org",
        "Gpus.Example.Org:443",
    ],
)
def test_names_of_the_machine_and_of_the_site_are_accepted(host: str, resolver: Path) -> None:
    assert is_expected(host, ["gpus.example.org", *own_names("gpu07", resolver)])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9836",
        "gpu07.evil.example",
        "xgpu07.example.org",
        "1.2.3.4.evil.example",
        "svc.example",
        "a b.example",
        "gpus.example.org.evil.example",
        "127.0.0.1.evil.example",
        "\u00e9.example",
    ],
)
def test_foreign_names_are_refused(host: str, resolver: Path) -> None:
    assert not is_expected(host, ["gpus.example.org", *own_names("gpu07", resolver)])


def test_without_a_resolver_the_machine_has_only_its_own_name(tmp_path: Path) -> None:
    assert own_names("GPU07.example.org", tmp_path / "none") == {"gpu07.example.org"}
