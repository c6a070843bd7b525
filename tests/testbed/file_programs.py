"""How the files that the programs read or write are made, and what a program makes of each."""

from __future__ import annotations

import gzip
import json
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import patch

from gpu_exporter.agent.attribution.identity import load_key
from gpu_exporter.agent.attribution.kubelet.consumers import Consumers
from gpu_exporter.agent.attribution.kubelet.podresources import ContainerDevices
from gpu_exporter.agent.attribution.remembered import Remembered
from gpu_exporter.agent.attribution.slurm.collected import Collected
from gpu_exporter.agent.attribution.slurm.gres.conf import GpuOrder
from gpu_exporter.agent.attribution.slurm.gres.epochs import Epochs, GresContent
from gpu_exporter.agent.attribution.slurm.gres.files import ConfPlace, read_order
from gpu_exporter.agent.attribution.slurm.on_node.job_files import read_ended, read_job_files
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig
from gpu_exporter.agent.attribution.slurm.picture import Picture
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.attribution.static import StaticSource
from gpu_exporter.agent.devices.nvml import recording
from gpu_exporter.agent.devices.scenario import load_scenario
from gpu_exporter.agent.inventory.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.ended import EndedRun, JobRecords
from gpu_exporter.agent.slurm_collector.rest import Rest
from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.promql import client
from gpu_exporter.common.slurm.gres import Gres
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.common.web.secure import WebConfig
from gpu_exporter.diagnosis.training.files import TrainingPlaces, TrainingReader
from gpu_exporter.reconciler.actions.journal import Journal
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.actor import Ended, Entry
from gpu_exporter.reconciler.audit import AuditLog, read_transitions
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.client.api import connect
from gpu_exporter.reconciler.pause import PauseFile, PauseNote
from gpu_exporter.reconciler.telemetry import Telemetry
from gpu_exporter.reconciler.texts import TextFiles
from gpu_exporter.reports.jobs.entries import read_records
from gpu_exporter.reports.jobs.names import AskedJob
from tests.testbed.pki import Authority

WALL = 1_800_000_000.0
CLOSED = "closed"
"""The answer of a program that knows nothing from its file."""
Look = Callable[[], object]


class Refused(Exception):
    """The program reports that it does not use the file."""


def text(name: str, content: str | bytes, mode: int = 0o644) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        return path

    return make


def again(look: Callable[[Path], object]) -> Callable[[Path], Look]:
    """Of a program that remembers nothing between two looks."""
    return lambda path: lambda: look(path)


# --- the agent's state directory

UNIT = UnitId("GPU-0")
HOLDER = Holder(HolderKey("kubernetes", "uid-1/main"), pod="train-0")


def empty_ledger() -> Ledger:
    return Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0)


def write_state(path: Path, now: float = 60.0) -> Path:
    ledger = empty_ledger()
    ledger.charge_poll(1.0, WALL, [ConfirmedAllocation(Allocation(UNIT, HOLDER), 1.0, None)])
    ledger.charge_poll(now, WALL, [ConfirmedAllocation(Allocation(UNIT, HOLDER), now, None)])
    state = StateFile(path.parent, 1.0, "boot")
    state.commit(state.prepare(ledger))
    return path


def restore(path: Path) -> object:
    state = StateFile(path.parent, 1.0, "boot")
    if why := state.restore(empty_ledger()):
        raise Refused(f"{path.name}: {why}")
    return state.written


def lock(path: Path) -> object:
    state = StateFile(path.parent, 1.0, "boot")
    state.acquire()
    state.release()
    return "locked"


def write_devices(path: Path, number: int = 2) -> Path:
    expected = ExpectedDevices(path.parent, "boot")
    expected.note([ExpectedDevice(f"GPU-{i}", f"0000:0{i}:00.0", i, "H100") for i in range(number)])
    expected.save()
    return path


def expect(path: Path) -> Look:
    expected = ExpectedDevices(path.parent, "boot")

    def look() -> object:
        expected.load()
        return dict(expected.devices) or CLOSED

    return look


def write_key(path: Path) -> object:
    path.unlink()
    return load_key(path.parent)


A = GpuOrder("minor", ("0", "1", "2", "3"))


def write_orders(path: Path, now: float = WALL + 100) -> Path:
    Epochs(path.parent, "n0").note(GresContent(A, now - 100, path="gres.conf"), now - 100, now)
    return path


def recall_orders(path: Path) -> object:
    order = Epochs(path.parent, "n0").at(WALL + 50, GpuOrder("unknown", problem="not read yet"))
    return CLOSED if order.kind == "unknown" else order


def write_jobs(path: Path, job: str = "4711") -> Path:
    Remembered(path.parent, path.name, "n0", "the holders of GPUs", writes=True).write({"jobs": [job]}, 0o600)
    return path


def recall_jobs(path: Path) -> object:
    body = Remembered(path.parent, path.name, "n0", "", writes=False).read()
    return CLOSED if body is None else body


# --- what holds GPUs

HOLDERS = "".join(f"- uuid: GPU-{i}\n  job: {4711 + i}\n  user: ada\n" for i in range(3))
JOB = (
    "job=4711\ngpus=0,3\nvisible=\nuser=ada\nuid=1000\naccount=phys\npartition=gpu\ncluster=c1\nrestarts=0\n"
    "start=1800000000\nnodes=12\nbegan=1800000000\n"
)


def poll(path: Path) -> Look:
    source = StaticSource(path, settled_s=0.0)
    return lambda: frozenset(source.poll().grants)  # a grant that is named twice is one


def read_jobs(path: Path) -> object:
    filed = read_job_files(path.parent)
    if filed.problem:
        raise Refused(filed.problem)
    runs = {job: (file.indexes, file.run) for job, file in filed.jobs.items() if file.run is not None}
    return runs or CLOSED  # slurmctld is asked


def list_ended(path: Path) -> object:
    found = read_ended(path.parent.parent, {}).jobs
    return [(job.job_id, job.file.indexes, job.end_wall) for job in found] or CLOSED


PICTURE = Picture(WALL, 90.0, SlurmConfig("c1", "", "", frozenset()), NodeRecord((("h100", 4),), Gres(()), WALL), {})


def ask_collector(path: Path) -> object:
    clock = ManualClock()
    clock.advance(WALL - clock.wall())
    look = Collected(path.stem, path.parent, 1.0, clock).look(())
    return look.node, look.config, look.jobs


GRES = "".join(
    f"NodeName=n{i} Name=gpu Type=h100 File=/dev/nvidia[0-3]\nNodeName=n{i} Name=shard Count=8\n" for i in (0, 1)
)


def make_gres(folder: Path) -> Path:
    """The faulty file is the included one. `start` notes when slurmd started: right after the file was written."""
    path = text("gres.d/gpus.conf", GRES)(folder)
    main = text("gres.conf", "Include gres.d/gpus.conf\n")(folder)
    started = max(each.stat().st_ctime for each in (path, main)) - 0.99
    (folder / "start").write_text(repr(started))
    return path


def order(path: Path) -> Look:
    folder = path.parent.parent
    start = float((folder / "start").read_text())
    epochs = Epochs(None, "n0")
    record = NodeRecord((("h100", 4),), Gres(()), start)

    def look() -> object:
        found = read_order([ConfPlace(folder / "gres.conf")], "n0", record, NVIDIA)
        order = epochs.note(found, start, start + 2.0)
        if order.kind == "unknown":
            raise Refused(order.problem)
        return order

    return look


UID = "00000001-0000-4000-8000-000000000000"
RESULTS = {"results": [{"device": "gpu-0", "driver": "gpu.nvidia.com", "adminAccess": True}]}
CLAIMS = {"v2": {"preparedClaims": {UID: {"status": {"allocation": {"devices": RESULTS}}}}}}
ENTRY = ContainerDevices(
    "ml", "pod", "main", "gpu.nvidia.com", ("gpu-0",), claimed=True, claim="ml/watch", cdi=(f"k8s.x/claim={UID}-gpu-0",)
)


def consume(path: Path) -> Look:
    consumers = Consumers(plugin=path.parent)
    return lambda: "watches" if not consumers.select([ENTRY]) else CLOSED


REPORT = {"format": "gpu-exporter-training/1", "run": "a", "steps": 500, "step_seconds": 49.5, "wait_seconds": 30.0}


def observe(path: Path) -> Look:
    clock = ManualClock()
    reader = TrainingReader(TrainingPlaces(path.parents[2] / "pods", path.parents[1]), clock)

    def look() -> object:
        clock.advance(20.0)
        found = [files.reports for _, files in reader.read([("job", "42")])]
        return [report._replace(age_s=0.0) for reports in found for report in reports] or CLOSED

    return look


# --- what an administrator names

CONFIG = "policy:\n  candidate_after: 20m\n  underused_after: 3h\nsampling:\n  interval: 2s\n"
SCENARIO = "gpus:\n  - model: H100\n    load: {kind: constant, value: 0.5}\n  - model: H100\nseed: 7\n"
LOG = "timestamp, utilization.gpu [%]\n" + "".join(f"2026/01/01 00:00:0{i}.000, {10 * i} %\n" for i in range(8))
RECORDING = "".join(
    json.dumps(each) + "\n"
    for each in (
        {"format": recording.FORMAT, "version": recording.VERSION, "wall": WALL, "duration_s": 1.0},
        {
            "call": "nvmlInit",
            "device": "",
            "arguments": [],
            "s": [0.0],
            "us": [1],
            "answer": [0],
            "answers": [["ok", 1]],
        },
    )
)
TOKEN = ".".join(("e30", urlsafe_b64encode(b'{"sun": "slurm"}').decode().rstrip("="), "c2lnbmF0dXJl"))


def pack(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def describe_scenario(path: Path) -> object:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(load_scenario(path)))  # loads are compared by their kind


def play(path: Path) -> object:
    found = recording.read_recording(path)
    return found if recording.is_recording(path) else CLOSED


def send_token(path: Path) -> Look:
    return client.Credentials(token=path).headers


def send_password(path: Path) -> Look:
    return client.Credentials(user="bob", password=path).headers


def send_header(path: Path) -> Look:
    return client.Credentials(header_file=path).headers


def slurm_token(path: Path) -> object:
    sent: list[object] = []

    def answer(*_: object, headers: object) -> str:
        sent.append(headers)
        return "{}"

    with patch("gpu_exporter.agent.slurm_collector.rest.fetch_text", answer):
        try:
            Rest(Address("http://127.0.0.1"), path, 1000).read_jobs()
        except SourceError:
            if not sent:
                raise
    return sent


@cache
def pki() -> dict[str, bytes]:
    """One for all tests: making keys takes longer than reading them."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        cert, key = authority.issue("client", "reconciler")
        config = authority.kubeconfig("admin", "https://127.0.0.1:6443", "admin")
        files = {"ca": authority.certificate, "cert": cert, "key": key, "config": config}
        return {name: path.read_bytes() for name, path in files.items()}


def make_pem(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for each in ("ca", "cert", "key"):
            text(each, pki()[each], 0o600)(folder)
        return folder / name

    return make


def use_certificates(path: Path) -> Look:
    ask = client.Client(path.parent / "ca", path.parent / "cert", path.parent / "key")

    def look() -> object:
        with patch("gpu_exporter.common.promql.client.fetch_text", lambda *given: given[4].get_ca_certs()):
            return ask(Address("http://127.0.0.1"))

    return look


WEB = f"""tls_server_config:
  cert_file: cert
  key_file: key
  client_ca_file: ca
  client_auth_type: RequireAndVerifyClientCert
basic_auth_users:
  ada: $2b$04${"." * 53}
  bob: $2b$04${"." * 53}
"""


def make_web(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        text("web.yaml", WEB)(make_pem("ca")(folder).parent)
        return folder / name

    return make


def serve(path: Path) -> Look:
    """What protects a port. A file that lacks a user admits one user less."""
    config = WebConfig(path.parent / "web.yaml")

    def look() -> object:
        for _ in range(2):  # a change counts when two looks have found the same
            config.turn()
        security = config.security
        return security.wants_password, security.context and security.context.verify_mode

    return look


def connect_api(path: Path) -> object:
    return connect(str(path)).core.api_client.configuration.host


# --- the reconciler's directory

ENTRY_OF_ACT = Entry(
    "id1", WALL, "kubernetes", "ml", "suspend", Reference("batch", "v1", "Job", "a", "uid-1"), Reference("batch", "v1", "Job", "a", "uid-1"), "idle",
    gpus=8, record=("policy", "batch", "team-a"), ends=(Ended("a-0", "uid-2", ("n1",)),),
)  # fmt: skip
texts_in = cache(TextFiles)  # it locks its directory


def write_journal(path: Path) -> Path:
    journal = Journal(texts_in(path.parent))
    journal.begin(ENTRY_OF_ACT._replace(ident=f"id{len(journal.read())}"))
    return path


def record_of(path: Path) -> Record:
    clock = ManualClock()
    clock.advance(WALL - clock.wall())
    return Record(texts_in(path.parent), Telemetry(), clock, 14 * 86_400.0)


def write_record(path: Path, ident: str = "id1") -> Path:
    record_of(path).note_act(ENTRY_OF_ACT._replace(ident=ident))
    return path


def load_record(path: Path) -> object:
    record = record_of(path)
    record.names()
    return [entry.ident for entry in record.acts_due()] or CLOSED


WHO = HolderName("kubernetes", "ml", "a-0")


def write_audit(path: Path) -> Path:
    clock = ManualClock()
    audit = AuditLog(path, Rulebook(Policy()), clock, lambda: None)
    for result in ("sent", "done", "confirmed"):
        audit.note_result(WHO, {"result": result})
    return path


def explain(path: Path) -> object:
    found = read_transitions(path, WHO)
    if found.gap:
        raise Refused(found.gap)
    return frozenset(str(record) for record in found.records) or CLOSED


def lock_texts(path: Path) -> object:
    os.close(TextFiles(path.parent)._lock)
    return "locked"


def write_pause(path: Path, until: float = WALL) -> Path:
    PauseFile(path).write_pause(PauseNote(until, "storage"))
    return path


def at(name: str, write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Makes a file as the program itself does."""
    return lambda folder: write(folder / name)


def write_job_record(path: Path, held: float = 3.0) -> Path:
    """The record of job 7 of root, as the exporter writes it. Another length of the run is another answer."""
    entry = {"scheduler": "slurm", "job_id": "7", "uuid": "GPU-0", "mig_uuid": "", "start_timestamp_seconds": WALL}
    record = {"end_timestamp_seconds": WALL + held, "allocations": [{**entry, "held_seconds": held}]}
    JobRecords(path.parent).write([EndedRun("", json.dumps(record))])
    return path


def report_record(path: Path) -> object:
    """What `gpu-exporter job` takes from it. It names a file that it does not read, and tells that no run was found."""
    runs, problems = read_records(AskedJob("7"), path.parent)
    if problems or not runs:
        raise Refused("; ".join(problems) or "no run in the last 7d")
    return [(run.raw, run.start, run.use) for run in runs]
