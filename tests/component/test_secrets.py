"""A known password in every option, variable and file that takes one: in no output, log, page, file or process list.

Every program runs against a server that answers rightly, refuses, redirects, has another clock, breaks off, or is not there.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import bcrypt
import psutil
import pytest
import yaml

from tests.testbed.peers import MODES, REFUSES, RIGHT, Peer, serve
from tests.testbed.pki import Authority
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.testbed.secret_options import IN_FILE, IN_TEXT, VARIABLES

pytestmark = pytest.mark.slow
MARKER = "zq7Marker-S3cret"
LOGIN = f"bob:{MARKER}"
NEEDLES = (MARKER, base64.b64encode(LOGIN.encode()).decode(), base64.b64encode(MARKER.encode()).decode().rstrip("="))
DOWN, TLS = "no server", "unknown certificate"
QUIET = {"GPU_EXPORTER_ATTRIBUTION_SLURM": "false", "PYTHONFAULTHANDLER": "1"}
JWT = f"eyJhbGciOiJIUzI1NiJ9.{base64.urlsafe_b64encode(json.dumps({'sun': 'slurm'}).encode()).decode()}.{MARKER}"


class Place(NamedTuple):
    """Where a program finds its server and its secrets. `secrets`: the one folder whose files may contain them."""

    server: str
    secrets: Path
    folder: Path

    def address(self) -> str:
        return self.server.replace("://", f"://{LOGIN}@")

    def file(self, name: str, text: str) -> Path:
        path = self.secrets / name
        path.write_text(text)
        path.chmod(0o600)
        return path


class Call(NamedTuple):
    """A way to hand a secret to a program. `sent`: what the server then sees of it."""

    options: tuple[str, ...]
    sent: str
    flags: Callable[[Place], list[str]]
    variables: Callable[[Place], dict[str, str]] = lambda _: {}


def basic(place: Place, prefix: str = "--source") -> list[str]:
    password = place.file("password", f"{MARKER}\n")
    return [f"{prefix}.basic-auth.username=bob", f"{prefix}.basic-auth.password-file={password}"]


def kubeconfig(place: Place, token: str = MARKER) -> Path:
    about = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "bob"}}],
        "clusters": [{"name": "x", "cluster": {"server": place.server}}],
        "users": [{"name": "bob", "user": {"token": "TOKEN"}}],
    }
    return place.file("kubeconfig", yaml.safe_dump(about).replace("TOKEN", token))


RECONCILE = "GPU_EXPORTER_RECONCILE_"
BASIC, BEARER = f"Basic {NEEDLES[1]}", f"Bearer {MARKER}"
ONCE = {
    "digest, password": Call(
        ("--source.basic-auth.password-file",), BASIC,
        lambda place: ["digest", f"--source.prometheus={place.server}", *basic(place)],
    ),
    "digest, token": Call(
        ("--source.bearer-token-file",), BEARER,
        lambda place: ["digest", f"--source.prometheus={place.server}", f"--source.bearer-token-file={place.file('token', MARKER)}"],
    ),
    "digest, header": Call(
        ("--source.header-file",), MARKER,
        lambda place: ["digest", f"--source.prometheus={place.server}", f"--source.header-file={place.file('headers', f'X-Api-Key: {MARKER}')}"],
    ),
    "digest, query": Call(
        (), MARKER, lambda place: ["digest", f"--source.prometheus={place.server}/p?token={MARKER}"]
    ),
    "explain, password": Call(
        ("--source.basic-auth.password-file",), BASIC,
        lambda place: ["explain", "ml/a", f"--source.prometheus={place.server}", *basic(place)],
    ),
    "explain, exporter": Call(
        ("--source.basic-auth.password-file",), BASIC,
        lambda place: ["explain", "ml/a", f"--source.exporter={place.server}", *basic(place)],
    ),
    "reconcile, address": Call(
        ("--source.prometheus", "--alertmanager.url"), BASIC, lambda _: ["reconcile", "--once"],
        lambda place: {f"{RECONCILE}SOURCE_PROMETHEUS": place.address(), f"{RECONCILE}ALERTMANAGER_URL": place.address()},
    ),
    "reconcile, exporter": Call(
        ("--source.exporter",), BASIC, lambda _: ["reconcile", "--once", "--log.level=debug"],
        lambda place: {f"{RECONCILE}SOURCE_EXPORTER": place.address()},
    ),
    "reconcile, header": Call(
        ("--source.header",), MARKER, lambda place: ["reconcile", "--once", "--format=json", f"--source.prometheus={place.server}"],
        lambda _: {f"{RECONCILE}SOURCE_HEADER": f"X-Api-Key: {MARKER}"},
    ),
    "pause, kubeconfig": Call(
        ("--kubernetes.kubeconfig",), BEARER,
        lambda place: ["pause", "--kubernetes.lease=ml/a", f"--kubernetes.kubeconfig={kubeconfig(place)}"],
    ),
    "top, password": Call(
        ("--from.basic-auth.password-file",), BASIC,
        lambda place: ["top", "--once", f"--from={place.server}", *basic(place, "--from")],
    ),
    "slurm-collector, address and token": Call(
        ("--slurmrestd", "--slurmrestd.token-file"), JWT,
        lambda place: [
            "slurm-collector", "--once", "--log.level=debug", f"--directory={place.folder}",
            f"--slurmrestd.token-file={place.file('jwt', JWT)}",
        ],
        lambda place: {"GPU_EXPORTER_SLURM_COLLECTOR_SLURMRESTD": place.address()},
    ),
    "holders, address": Call(
        ("--attribution.slurm.collected",), BASIC,
        lambda place: ["holders", f"--devices.scenario={scenario(place)}", "--state.directory=", "--attribution.slurm", "--attribution.slurm.node=n0"],
        lambda place: {"GPU_EXPORTER_ATTRIBUTION_SLURM_COLLECTED": place.address()},
    ),
}  # fmt: skip


# These differ from another one only by what is sent, and not by what is printed.
ALIKE = frozenset(("digest, token", "digest, header", "digest, query", "explain, password"))


def scenario(place: Place) -> Path:
    path = place.folder / "scenario.yaml"
    path.write_text("gpus: [{model: H100}]\n")
    return path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Of the secrets, and of everything that a program writes."""
    made = tmp_path / "secrets", tmp_path / "written"
    for path in made:
        path.mkdir()
    return made


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GPU_EXPORTER_")}
    return {**kept, **QUIET, **more}


def run(flags: list[str], variables: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """Status and output. The working directory is scanned too."""
    done = subprocess.run(
        [*GPU_EXPORTER, *flags],
        env=environment(**variables),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def find_secret(text: str) -> list[str]:
    return [needle for needle in NEEDLES if needle in text]


def find_written(folder: Path) -> list[str]:
    return [
        str(path) for path in folder.rglob("*") if path.is_file() and find_secret(path.read_text("utf-8", "replace"))
    ]


def command_lines(pid: int) -> str:
    """Of a process and of those that it started."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return "\n".join(" ".join(process.cmdline()) for process in processes)


@pytest.mark.parametrize("name", ONCE)
def test_the_secret_is_sent_and_appears_nowhere(name: str, folders: tuple[Path, Path], authority: Authority) -> None:
    call = ONCE[name]
    secrets, written = folders
    for mode in (RIGHT, REFUSES, DOWN) if name in ALIKE else (*MODES, DOWN, TLS):
        certificate = authority.issue("server", "x") if mode == TLS else None
        peer = Peer(mode if mode in MODES else RIGHT)
        with serve(peer, certificate):
            server = f"http{'s' * (mode == TLS)}://{peer.place if mode != DOWN else '127.0.0.1:1'}"
            place = Place(server, secrets, written)
            code, said = run(call.flags(place), call.variables(place), written)
        assert said and code in (0, 2, 3, 4), f"{mode}: {said}"
        assert (find_secret(said), find_written(written)) == ([], []), f"{mode}: {said}"
        if mode == RIGHT:
            assert any(call.sent in each for each in peer.seen), f"not sent: {peer.seen}"
            assert "Traceback" not in said


WRONG = {
    "missing": None,
    "empty": b"",
    "not UTF-8": MARKER.encode() + b"\xff",
    "several words": f"{MARKER} b\n c: {MARKER}".encode(),
    "long": MARKER.encode() * 5000,
    "NUL": MARKER.encode() + b"\0",
    "text": MARKER.encode(),
}
WRONG_YAML = {
    "alias": f"users: [{MARKER}: *{MARKER}]".encode(),
    "tag": f"users: !{MARKER} x".encode(),
    "number": f"basic_auth_users: {{bob: !!int {MARKER}}}".encode(),
    "no hash": f"basic_auth_users: {{bob: {MARKER}}}".encode(),
    "kubeconfig": f"current-context: x\nusers: {MARKER}\ncontexts: {MARKER}\nclusters: {MARKER}".encode(),
}
IN_YAML = ("--kubernetes.kubeconfig", "--web.config.file")
FILES = {
    "--source.basic-auth.password-file": [
        "digest",
        "--source.prometheus=http://SERVER",
        "--source.basic-auth.username=bob",
    ],
    "--source.bearer-token-file": ["reconcile", "--once", "--source.prometheus=http://SERVER"],
    "--source.header-file": ["reconcile", "--once", "--source.prometheus=http://SERVER"],
    "--source.tls.key": ["digest", "--source.prometheus=http://SERVER", "--source.tls.cert=CERT"],
    "--from.basic-auth.password-file": ["top", "--once", "--from=SERVER", "--from.basic-auth.username=bob"],
    "--slurmrestd.token-file": ["slurm-collector", "--once", "--directory=.", "--slurmrestd=http://SERVER"],
    "--kubernetes.kubeconfig": ["pause", "--kubernetes.lease=ml/a"],
    "--web.config.file": ["slurm-collector", "--web.listen-address=127.0.0.1:0"],
}


@pytest.mark.parametrize("flag", FILES)
def test_a_file_that_is_not_what_it_should_be_is_not_quoted(
    flag: str, folders: tuple[Path, Path], authority: Authority
) -> None:
    secrets, written = folders
    certificate, _ = authority.issue("client", "x")
    refused = 0
    with serve(Peer()) as peer:
        given = [each.replace("SERVER", peer.place).replace("CERT", str(certificate)) for each in FILES[flag]]
        for name, content in (WRONG | (WRONG_YAML if flag in IN_YAML else {})).items():
            path = secrets / "file"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
                path.chmod(0o600)
            code, said = run([*given, f"{flag}={path}"], {}, written)
            assert find_secret(said) == [], f"{name}: {said}"
            assert "Traceback" not in said and said, f"{name}: {said}"
            refused += code in (2, 3)
    assert refused >= 2


def test_every_option_that_may_have_a_secret_has_a_case_here() -> None:
    sent = {option for call in ONCE.values() for option in call.options}
    assert sorted(IN_TEXT - {"--from"}) == sorted(sent & IN_TEXT), "--from takes none, since top has no variables"
    assert sorted(IN_FILE) == sorted((sent & IN_FILE) | set(FILES))
    assert VARIABLES == ("SLURM_JWT", "http_proxy"), "below"


@pytest.mark.parametrize("mode", [RIGHT, "401", DOWN, "clock"])
def test_no_daemon_publishes_or_logs_a_secret(mode: str, folders: tuple[Path, Path], processes: Processes) -> None:
    secrets, written = folders
    web = secrets / "web.yaml"
    hashed = bcrypt.hashpw(MARKER.encode(), bcrypt.gensalt(4)).decode()
    web.write_text(yaml.safe_dump({"basic_auth_users": {"bob": hashed}}))
    token = secrets / "jwt"
    token.write_text(JWT)
    login = {"Authorization": BASIC}
    with serve(Peer(mode if mode != DOWN else RIGHT)) as peer:
        address = f"http://{LOGIN}@{peer.place if mode != DOWN else '127.0.0.1:1'}"
        place = Place(address, secrets, written)
        daemons = {
            "agent": (
                [f"--devices.scenario={scenario(place)}", f"--state.directory={written}/agent", "--attribution.slurm", "--attribution.slurm.node=n0"],
                {"GPU_EXPORTER_ATTRIBUTION_SLURM_COLLECTED": address},
                ("/", "/metrics", "/api/v1/status", "/api/v1/table", "/api/v1/holders", f"/{MARKER[:3]}"),
                ("/api/v1/status", "/slurm/nodes/n0: "),
            ),
            "reconcile": (
                ["reconcile", f"--state.directory={written}", f"--pause.file={written}/pause", "--interval=200ms"],
                {f"{RECONCILE}SOURCE_PROMETHEUS": address, f"{RECONCILE}ALERTMANAGER_URL": address},
                ("/", "/metrics", "/-/ready", "/-/healthy"),
                ("/metrics", "gpu_reconciler_cycles_total 1"),
            ),
            "slurm-collector": (
                ["slurm-collector", f"--slurmrestd.token-file={token}", "--interval=200ms"],
                {"GPU_EXPORTER_SLURM_COLLECTOR_SLURMRESTD": address},
                ("/", "/metrics", "/api/v1/slurm/nodes/n0"),
                ("/metrics", "gpu_slurm_collector_"),
            ),
        }  # fmt: skip
        for name, (flags, variables, paths, (path, sign)) in daemons.items():
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            given = [*flags, f"--web.listen-address=127.0.0.1:{port}", f"--web.config.file={web}", "--log.level=debug"]
            running = processes.start([*GPU_EXPORTER, *given], environment(**variables), name=f"{name}-{mode}")
            wait_for(
                lambda url=url, path=path, sign=sign: sign in (fetch(url + path, login) or "") or None,  # type: ignore[misc]
                f"{name}: {sign}",
            )
            for headers in ({}, {"Authorization": f"Basic {NEEDLES[2]}"}, login):
                shown = "\n".join(f"{path}: {fetch(url + path, headers)}" for path in paths)
                assert find_secret(shown) == []
            assert find_secret(command_lines(running.process.pid)) == []
            assert running.stop() == 0
            assert running.log() and find_secret(running.log()) == [], running.log()
        assert find_written(written) == []
        if mode != DOWN:
            assert peer.seen.count(BASIC) >= 3


@pytest.fixture
def fake_slurm(folders: tuple[Path, Path]) -> Iterator[Path]:
    """Commands that print their own command line on standard error, and fail."""
    secrets, written = folders
    programs = written / "bin"
    programs.mkdir()
    for name in ("squeue", "scontrol"):
        path = programs / name
        path.write_text(
            f"""#!/bin/sh
[ "$SLURM_JWT" = "$(cat {secrets}/jwt)" ] || exit 9
tr '\\0' ' ' < /proc/$$/cmdline | tee -a {written}/lines >&2
exit 1
"""
        )
        path.chmod(0o755)
    yield programs


def test_a_token_of_slurm_is_in_no_command_line(folders: tuple[Path, Path], fake_slurm: Path) -> None:
    secrets, written = folders
    (secrets / "jwt").write_text(MARKER)
    variables = {
        "SLURM_JWT": MARKER,
        "PATH": f"{fake_slurm}:{os.environ['PATH']}",
        "GPU_EXPORTER_ATTRIBUTION_SLURM": "true",
    }
    place = Place("", secrets, written)
    for flags in (
        ["slurm-collector", "--once", f"--directory={written}", "--log.level=debug"],
        ["holders", f"--devices.scenario={scenario(place)}", "--state.directory=", "--attribution.slurm.node=n0"],
    ):
        (written / "lines").unlink(missing_ok=True)
        code, said = run(flags, variables, written)
        assert code in (3, 4) and find_secret(said) == [], said
        lines = (written / "lines").read_text()
        assert "scontrol" in lines and find_secret(lines) == []
    assert find_written(written) == []


@pytest.mark.parametrize("mode", [RIGHT, "401", "garbage", DOWN])
def test_the_password_of_a_proxy_appears_nowhere(mode: str, folders: tuple[Path, Path]) -> None:
    secrets, written = folders
    with serve(Peer(mode if mode != DOWN else RIGHT)) as peer:
        proxy = f"http://{LOGIN}@{peer.place if mode != DOWN else '127.0.0.1:1'}"
        variables = {"http_proxy": proxy, "https_proxy": proxy, "HTTPS_PROXY": proxy, "no_proxy": ""}
        place = Place("http://prometheus.invalid", secrets, written)
        for flags in (
            ["digest", "--source.prometheus=http://prometheus.invalid"],
            ["digest", "--source.prometheus=https://prometheus.invalid"],
            ["pause", "--kubernetes.lease=ml/a", f"--kubernetes.kubeconfig={kubeconfig(place)}"],
        ):
            code, said = run(flags, variables, written)
            assert said and code in (0, 2, 3, 4) and find_secret(said) == [], said
    assert mode == DOWN or BASIC in peer.seen
    assert find_written(written) == []


BUG = """
import http.client
def read(*_): raise RuntimeError("a bug")
http.client.HTTPResponse.read1 = read
from gpu_exporter.cli.main import main
main()
"""


def test_the_traceback_of_a_bug_has_no_secret(folders: tuple[Path, Path]) -> None:
    secrets, written = folders
    with serve(Peer()) as peer:
        place = Place(f"http://{peer.place}", secrets, written)
        for name in (
            "digest, password",
            "digest, token",
            "reconcile, address",
            "slurm-collector, address and token",
            "top, password",
        ):
            call = ONCE[name]
            command = [GPU_EXPORTER[0], "-c", BUG, *call.flags(place)]
            done = subprocess.run(
                command,
                env=environment(**call.variables(place)),
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert "RuntimeError: a bug" in done.stderr and find_secret(done.stdout + done.stderr) == [], done.stderr
    assert find_written(written) == []
