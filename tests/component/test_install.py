"""The install texts of the docs, run as they are written, in a copy of the checkout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpu_exporter.cli.agent_flags import DEFAULT_PORT
from tests.testbed.processes import Processes, fetch, free_port, wait_for
from tests.testbed.written import ROOT, calls, checkout, code_block

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
SCENARIO = '{"gpus": [{"model": "H100"}], "holders": [{"gpu": 0, "kind": "job", "name": "48113", "user": "mira"}]}'


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a new user, whose exporter reads simulated GPUs."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "scenario.json").write_text(SCENARIO)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_EXPORTER_", "PYTHON"))}
    kept["PATH"] = os.pathsep.join(each for each in kept["PATH"].split(os.pathsep) if ".venv" not in each)
    return kept | {
        "HOME": str(folder),
        "GPU_EXPORTER_DEVICES_SCENARIO": str(folder / "scenario.json"),
        "GPU_EXPORTER_ATTRIBUTION_SLURM": "false",
        "GPU_EXPORTER_STATE_DIRECTORY": str(folder / "state"),
    }


@pytest.fixture(scope="module")
def installed(clone: Path, home: dict[str, str]) -> str:
    """Installs as the README says; the last command of its block, which serves."""
    *install, serve = code_block(README, "pip install .\n").splitlines()
    script = "\n".join(install)
    done = subprocess.run(["sh", "-euc", script], cwd=clone, env=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return serve


def run(script: str, clone: Path, home: Mapping[str, str]) -> str:
    """What a script prints that is run in the checkout, in the environment that the README makes there."""
    script = f". gpu-exporter-venv/bin/activate\n{script}"
    done = subprocess.run(["sh", "-euc", script], cwd=clone, env=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_readme_says_of_pip_works(
    processes: Processes, clone: Path, home: dict[str, str], installed: str
) -> None:
    """The exporter serves. Then the other commands of the README, in the same environment."""
    assert installed.split() == ["gpu-exporter", "#", "serves", "on", DEFAULT_PORT]
    port = free_port()
    serves = home | {"GPU_EXPORTER_WEB_LISTEN_ADDRESS": f"127.0.0.1:{port}"}
    # With exec, because the shell would not end the exporter.
    script = f"cd {clone}\n. gpu-exporter-venv/bin/activate\nexec {installed}"
    running = processes.start(["sh", "-euc", script], serves, name="readme")

    def series() -> bool:
        assert running.process.poll() is None, running.log()
        return "\ngpu_up{" in (fetch(f"http://127.0.0.1:{port}/metrics") or "")

    wait_for(series, "the exporter of the README")

    once = code_block(ROOT / "docs" / "slurm.md", "gpu-exporter --once --format table  # values")
    (table,) = [line for line in once.splitlines() if line.startswith("gpu-exporter --once")]
    assert "job 48113" in run(table, clone, home)
    decided = run(f"gpu-exporter reconcile --once --source.exporter 127.0.0.1:{port}", clone, home)
    assert "job 48113" in decided and "1 exporter and 1 allocation seen" in decided
    extra = "pip install '.[reconciler]'"
    assert extra in (ROOT / "docs" / "reconciler.md").read_text("utf-8")
    run(extra, clone, home)
    where = run("python3 -c 'import kubernetes, gpu_exporter; print(gpu_exporter.__file__)'", clone, home)
    assert where.startswith(str(clone / "gpu-exporter-venv"))


def test_what_the_page_of_slurm_says_works(clone: Path, home: dict[str, str], installed: str, tmp_path: Path) -> None:
    """In the environment of the README, whose files are installed below another folder than /etc."""
    page = ROOT / "docs" / "slurm.md"
    blocks = [
        code_block(page, text)
        for text in ("files=$(gpu-exporter contrib)", "$files/systemd/gpu-exporter.service", "$files/slurm/prolog.sh")
    ]
    etc = tmp_path / "etc"
    for name in ("systemd/system", "slurm/prolog.d", "slurm/epilog.d"):
        (etc / name).mkdir(parents=True)
    script = f"cd {clone}\n. gpu-exporter-venv/bin/activate\n" + "\n".join(blocks).replace("/etc/", f"{etc}/")
    assert calls(script, ["systemctl"], tmp_path, environment=home) == [
        ["systemctl", "enable", "--now", "gpu-exporter"]
    ]
    installed = {
        path.relative_to(etc).as_posix(): os.access(path, os.X_OK) for path in etc.rglob("*") if path.is_file()
    }
    assert installed == {
        "systemd/system/gpu-exporter.service": False,
        "slurm/prolog.d/zzz-gpu-exporter.sh": True,
        "slurm/epilog.d/zzz-gpu-exporter.sh": True,
    }
