"""Byte-level fuzzing with coverage, by atheris (`make fuzz`): effects of foreign bytes on the parsers.

Runs outside of CI; in CI, hypothesis does the same with fewer cases. Each target runs in its own process for SECONDS.
Any exception except the parser's own error is a finding: it ends the run with status 1, and its input remains below
out/fuzz.

    python -m tests.fuzz.run [--seconds 600] [TARGET ...]
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "fuzz"


def protobuf(data: bytes) -> None:
    from gpu_exporter.agent.attribution.kubelet.podresources import read_pods
    from gpu_exporter.agent.attribution.kubelet.protobuf import ProtobufError

    try:
        read_pods(lambda device_id: device_id).read(data)
    except ProtobufError:
        return


def http2(data: bytes) -> None:
    """The kubelet's side of a call: frames of HTTP/2 as its socket delivers them."""
    import time

    import h2.config
    import h2.connection
    import h2.exceptions

    from gpu_exporter.agent.attribution.kubelet.grpc_unix import CallError, _receive

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = h2.connection.H2Connection(
            config=h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        connection.initiate_connection()
        connection.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/")])
        theirs.setblocking(False)
        theirs.send(data[:65536])
        theirs.shutdown(socket.SHUT_WR)
        try:
            list(_receive(ours, connection, time.monotonic() + 1.0))
        except (CallError, OSError, h2.exceptions.H2Error, ValueError):  # `call` turns all of these into a CallError
            return


def request(data: bytes) -> None:
    from gpu_exporter.common.web.request import BadRequest, parse_head

    try:
        found = parse_head(data)
    except BadRequest:
        return
    found.names()
    found.takes_gzip()
    found.takes_openmetrics()


def state(data: bytes) -> None:
    """A state file with a correct checksum."""
    from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
    from gpu_exporter.agent.ledger.state import HEADER, VERSION, StateFile

    body = data.decode("utf-8", "replace")
    directory = Path(tempfile.gettempdir())
    file = StateFile(directory, 10.0, "b")
    file.path = directory / f"fuzz-state-{zlib.crc32(data)}"
    file.path.write_text(f"{HEADER} {VERSION} {zlib.crc32(body.encode()):08x}\n{body}", encoding="utf-8")
    try:
        ledger = Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0)
        file.restore(ledger)
        file.prepare(ledger)
    finally:
        file.path.unlink()


def promql(data: bytes) -> None:
    from gpu_exporter.common.errors import AnswerError
    from gpu_exporter.common.promql.vector import parse_vector

    try:
        parse_vector(data.decode("utf-8", "replace"), "up")
    except AnswerError:
        return


def training(data: bytes) -> None:
    """What a job writes about its training, also twice in a row."""
    from gpu_exporter.common.model.units import UnitId
    from gpu_exporter.diagnosis.training.files import TrainingFiles
    from gpu_exporter.diagnosis.training.pace import NodeTraining
    from gpu_exporter.diagnosis.training.reports import parse_report

    first, _, second = data.partition(b"\n")
    trainings, unit = NodeTraining(), UnitId("GPU-1")
    for at, part in enumerate((first, second)):
        try:
            report = parse_report(part, 1.0, "run-a")
        except ValueError:
            return
        trainings.note(("job", "1"), TrainingFiles(15.0 * at, (report, report._replace(rank=1, run="b"))))
        trainings.view(("job", "1"), unit, (unit,), 15.0 * at, 3600.0)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (protobuf, http2, request, state, promql, training)
}
SEEDS = {
    "protobuf": b"\n\x16\n\x01p\x12\x01n\x1a\x0e\n\x01c\x12\t\n\x01r\x12\x04GPU-",
    "request": b"GET /metrics?name[]=up HTTP/1.1\r\nHost: x\r\nAccept: text/plain;q=0.5\r\nAccept-Encoding: gzip;q=0\r\n\r\n",
    "state": b'{"boot_id": "b", "units": [{"unit": ["GPU-0", ""], "busy_s": 1.0}], "holders": [], "numbers": []}',
    "promql": b'{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {"pod": "a"}, "value": [1, "2"]}]}}',
    "training": b'{"format": "gpu-exporter-training/1", "steps": 9, "step_seconds": 1.5, "gpus": ["GPU-1"]}\n'
    b'{"format": "gpu-exporter-training/1", "steps": 40, "step_seconds": 4, "phases": {"forward": {"seconds": 1}}}',
    "http2": bytes.fromhex("000000040000000000000006010400000001885f8b1d75d0620d263d4c4d6564"),
}


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["gpu_exporter", "h2", "hpack", "hyperframe"]):
        TARGETS[name](SEEDS[name])  # this call imports the modules that it needs
    options = [f"-max_total_time={seconds}", "-max_len=4096", f"-artifact_prefix={OUT}/{name}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    options = parser.parse_args()
    corpora = {name: OUT / f"corpus-{name}" for name in options.targets}
    if options.one:
        fuzz(options.targets[0], options.seconds, corpora[options.targets[0]])
        return 0
    findings = 0
    for name, corpus in corpora.items():
        corpus.mkdir(parents=True, exist_ok=True)
        (corpus / "seed").write_bytes(SEEDS[name])
        command = [sys.executable, "-m", "tests.fuzz.run", "--one", f"--seconds={options.seconds}", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
        print(
            f"{name}: {int(executed[1]) if executed else 0:,} executions in {options.seconds} s, status {done.returncode}"
        )
        if done.returncode != 0 or executed is None:
            findings += 1
            print(done.stderr[-3000:])
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
