"""`identity.user` from end to end: neither the daemon nor `--once` prints a user's name, and the hash never changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, run_exporter, wait_for

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")
PATHS = ("/metrics", "/", "/api/v1/status", "/api/v1/table", "/api/v1/holders")


@pytest.fixture
def flags(nvml_table: NvmlTable, tmp_path: Path) -> list[str]:
    """Flags for a job of user lovelace that holds one GPU, and for a state directory."""
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table)
    uuid = feeder.stage.scenario.gpus[0].uuid
    (tmp_path / "holders.yaml").write_text(f"- {{uuid: {uuid}, job: 7, gpus: 1, user: lovelace, account: optics}}\n")
    return [*QUIET, f"--attribution.static={tmp_path / 'holders.yaml'}", f"--state.directory={tmp_path / 'state'}"]


def config(directory: Path, mode: str) -> str:
    path = directory / "c.yaml"
    path.write_text(f"attribution: {{interval: 200ms}}\nidentity: {{user: {mode}}}\n", encoding="utf-8")
    return f"--config.file={path}"


def users(body: str) -> list[tuple[str, str]]:
    return [(entry["user"], entry["account"]) for entry in json.loads(body)["allocations"]]


def test_a_users_hash_is_the_same_after_restarts_and_in_once(
    processes: Processes, nvml_environment: dict[str, str], flags: list[str], tmp_path: Path
) -> None:
    hashed = config(tmp_path, "hmac")
    seen: list[tuple[str, str]] = []
    for _ in range(2):
        running, url = processes.start_exporter(*flags, hashed, environment=nvml_environment)
        seen += wait_for(lambda url=url: users(fetch(f"{url}/api/v1/status") or "{}") or None, "the holder")
        for path in PATHS:
            body = fetch(f"{url}{path}") or ""
            assert seen[0][0] in body
            assert "lovelace" not in body
            assert "optics" not in body
        assert running.stop() == 0
        assert "optics" not in running.log()
    once = run_exporter("--once", "--format=json", *flags, hashed, environment=nvml_environment)
    seen += users(once.stdout)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert (tmp_path / "state" / "identity.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("mode", "shown"), [("auto", ("lovelace", "optics")), ("name", ("lovelace", "optics")), ("none", ("", ""))]
)
def test_the_other_modes_show_the_name_or_nothing(
    nvml_environment: dict[str, str], flags: list[str], tmp_path: Path, mode: str, shown: tuple[str, str]
) -> None:
    once = run_exporter("--once", "--format=json", *flags, config(tmp_path, mode), environment=nvml_environment)
    assert users(once.stdout) == [shown]
    assert not (tmp_path / "state" / "identity.key").exists()


def test_once_without_a_key_shows_no_user_and_gives_the_reason(
    nvml_environment: dict[str, str], flags: list[str], tmp_path: Path
) -> None:
    mode = config(tmp_path, "hmac")
    once = run_exporter("--once", "--format=json", *flags, "--state.directory=", mode, environment=nvml_environment)
    assert users(once.stdout) == [("", "")]
    assert (
        "gpu-exporter: warning: users and accounts are not shown: identity.user=hmac needs a state directory for its key"
        in once.stderr
    )
