"""Every file that the programs read or write, as a table.

`tests/unit/test_file_faults.py` damages each of them in every way, and holds that no file is missing here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.identity import KEY_FILE, load_key
from gpu_exporter.agent.attribution.kubelet.consumers import CHECKPOINT
from gpu_exporter.agent.attribution.slurm.gres.epochs import FILE as ORDERS
from gpu_exporter.agent.attribution.slurm.memory import FILE as JOBS
from gpu_exporter.agent.attribution.slurm.on_node.job_files import ENDED
from gpu_exporter.agent.attribution.slurm.picture import render_picture
from gpu_exporter.agent.devices.replay import read_recording
from gpu_exporter.agent.inventory.expected import FILE as DEVICES
from gpu_exporter.agent.slurm_collector.collector import write_answers
from gpu_exporter.common.config.load import load_config
from gpu_exporter.common.files import write_atomically
from gpu_exporter.common.web.hosts import own_names
from gpu_exporter.reconciler.actions.journal import Journal
from gpu_exporter.reconciler.pause import PauseFile
from gpu_exporter.reports.history.kept import Folder
from tests.testbed.file_programs import (
    CLAIMS,
    CLOSED,
    CONFIG,
    HOLDERS,
    JOB,
    LOG,
    PICTURE,
    RECORDING,
    REPORT,
    SCENARIO,
    TOKEN,
    WALL,
    Look,
    again,
    ask_collector,
    at,
    connect_api,
    consume,
    describe_scenario,
    expect,
    explain,
    list_ended,
    load_record,
    lock,
    lock_texts,
    make_gres,
    make_pem,
    make_web,
    observe,
    order,
    pack,
    pki,
    play,
    poll,
    read_jobs,
    recall_jobs,
    recall_orders,
    report_record,
    restore,
    send_header,
    send_password,
    send_token,
    serve,
    slurm_token,
    text,
    texts_in,
    use_certificates,
    write_audit,
    write_devices,
    write_job_record,
    write_jobs,
    write_journal,
    write_key,
    write_orders,
    write_pause,
    write_record,
    write_state,
)

SERVER_REFUSES = "a server refuses a part of a secret or of a certificate"
SEEN_AT_START = "read once, at the start; a YAML file that is cut between two lines is a whole file (docs/security.md)"
KEYS = 40  # of a file of certificates: each look takes milliseconds


def keep_answer(folder: Path, answer: str) -> Path:
    Folder(folder).put("query", answer)
    return next(folder.glob("*.json.gz"))


class Row(NamedTuple):
    """One file.

    `sites`: the functions that open it, as MODULE:FUNCTION. `named`: an administrator names it, so that it may be a
    link. `make`: writes the whole file below a folder, and returns its path. `start`: begins to read it, as the program
    does at its start; what it returns gives the program's answer, each time that the program looks. None for a file
    that is only written. `write`: replaces its content, as the program does. `cut`: why the answer of a part may count;
    with `only_at_start`, not of a file that the program has read whole before. `silent`: why a refused file needs no
    line. `places`: at how many bytes a long file is cut.
    """

    name: str
    sites: tuple[str, ...]
    make: Callable[[Path], Path]
    start: Callable[[Path], Look] | None = None
    named: bool = False
    write: Callable[[Path], object] | None = None
    cut: str = ""
    only_at_start: bool = False
    silent: str = ""
    places: int = 200


ROWS = (
    Row(
        "state",
        ("agent/ledger/state.py:StateFile.restore", "agent/ledger/state.py:StateFile.commit"),
        at("state", write_state),
        again(restore),
        write=lambda path: write_state(path, 90.0),
    ),
    Row(
        "0.jsonl",
        ("agent/node/ended.py:JobRecords._append", "reports/jobs/entries.py:read_records"),
        at("0.jsonl", write_job_record),
        again(report_record),
        write=lambda path: write_job_record(path, 4.0),
    ),
    Row("lock", ("agent/ledger/state.py:StateFile.acquire",), text("lock", "", 0o600), again(lock)),
    Row(
        "devices.json",
        ("agent/inventory/expected.py:_read", "agent/inventory/expected.py:ExpectedDevices.save"),
        at(DEVICES, write_devices),
        expect,
        write=lambda path: write_devices(path, 4),
    ),
    Row(
        "identity.key",
        ("agent/attribution/identity.py:_read_key", "agent/attribution/identity.py:_make_key"),
        text(KEY_FILE, "0123456789abcdef" * 4 + "\n", 0o600),
        again(lambda path: load_key(path.parent)),
        write=write_key,
    ),
    Row(
        "slurm-orders.json",
        ("agent/attribution/remembered.py:Remembered.read", "agent/attribution/remembered.py:Remembered.write"),
        at(ORDERS, write_orders),
        again(recall_orders),
        write=lambda path: write_orders(path, WALL + 5000),
    ),
    Row(
        "slurm-jobs.json",
        (),
        at(JOBS, write_jobs),
        again(recall_jobs),
        write=lambda path: write_jobs(path, "4712"),
    ),
    Row(
        "static holders",
        ("agent/attribution/static.py:StaticSource._read",),
        text("holders.yaml", HOLDERS),
        poll,
        named=True,
        cut="a file that stays cut between two lines is a whole file (docs/interfaces.md)",
        only_at_start=True,
    ),
    Row(
        "job file",
        ("agent/attribution/slurm/on_node/job_files.py:_read",),
        text("jobs/4711", JOB),
        again(read_jobs),
        silent="slurmctld is asked about a job whose file lacks a part, as other prologs write it",
    ),
    Row(
        "file of an ended job",
        (),
        text(f"jobs/{ENDED}/4711", f"{JOB}end=1800000100\n"),
        again(list_ended),
        silent="slurmctld reports the end too, up to a minute later",
    ),
    Row(
        "NODE.json of the collector",
        ("agent/slurm_collector/collector.py:write_answers",),
        text("n0.json", render_picture(PICTURE)),
        again(ask_collector),
        write=lambda path: write_answers({"n0": render_picture(PICTURE._replace(each_s=60.0))}, path.parent, 0o644),
    ),
    Row(
        "gres.conf",
        ("agent/attribution/slurm/gres/files.py:_read_text",),
        make_gres,
        order,
        named=True,
    ),
    Row(
        "checkpoint of the DRA driver",
        ("agent/attribution/kubelet/consumers.py:_Checkpoint.refresh",),
        text(CHECKPOINT, json.dumps(CLAIMS)),
        consume,
        named=True,
    ),
    Row(
        "training report",
        ("diagnosis/training/files.py:_read",),
        text("training/42/run-a.json", json.dumps(REPORT)),
        observe,
    ),
    Row(
        "config",
        ("common/config/load.py:load_config",),
        text("config.yaml", CONFIG),
        again(load_config),
        named=True,
        cut=SEEN_AT_START,
    ),
    Row(
        "scenario",
        ("agent/devices/scenario.py:load_scenario",),
        text("scenario.yaml", SCENARIO),
        again(describe_scenario),
        named=True,
        cut=SEEN_AT_START,
    ),
    Row(
        "log of nvidia-smi",
        ("agent/devices/smi_log.py:read_smi_logs",),
        text("gpu.csv", LOG),
        again(lambda path: read_recording(path).utilization),
        named=True,
        cut="a log that is still written is played up to its last whole line",
    ),
    Row(
        "packed log of nvidia-smi",
        (),
        text("gpu.csv.gz", pack(LOG)),
        again(lambda path: read_recording(path).utilization),
        named=True,
    ),
    Row(
        "recording",
        (
            "agent/devices/nvml/recording.py:read_recording",
            "agent/devices/nvml/recording.py:is_recording",
            "agent/runtime/playback.py:play_back",
            "cli/agent_parts.py:_build_replay",
        ),
        text("node.rec.gz", pack(RECORDING)),
        again(play),
        named=True,
    ),
    Row(
        "token of the source",
        ("common/promql/client.py:_read_secret",),
        text("token", "abc.def.ghi\n", 0o600),
        send_token,
        named=True,
        cut=SERVER_REFUSES,
    ),
    Row(
        "password of the source",
        (),
        text("password", "correct horse\n", 0o600),
        send_password,
        named=True,
        cut=SERVER_REFUSES,
    ),
    Row(
        "secret headers of the source",
        (),
        text("headers", "X-Scope-OrgID: team-a\nX-Token: abc\n", 0o600),
        send_header,
        named=True,
        cut=SERVER_REFUSES,
    ),
    Row(
        "token of slurmrestd",
        ("agent/slurm_collector/rest.py:Rest._headers",),
        text("jwt", f"SLURM_JWT={TOKEN}\n", 0o600),
        again(slurm_token),
        named=True,
        cut=SERVER_REFUSES,
    ),
    Row(
        "authorities",
        ("common/promql/client.py:Client._read_files",),
        make_pem("ca"),
        use_certificates,
        named=True,
        places=KEYS,
    ),
    Row("client certificate", (), make_pem("cert"), use_certificates, named=True, places=KEYS),
    Row("client key", (), make_pem("key"), use_certificates, named=True, places=KEYS),
    Row(
        "kubeconfig",
        ("reconciler/kubernetes/client/api.py:connect",),
        lambda folder: text("kubeconfig", pki()["config"], 0o600)(folder),
        again(connect_api),
        named=True,
    ),
    Row(
        "web configuration",
        ("common/web/settings.py:_read",),
        make_web("web.yaml"),
        serve,
        places=KEYS,
        named=True,
        cut=SEEN_AT_START,
        only_at_start=True,
    ),
    Row("server certificate", (), make_web("cert"), serve, named=True, places=KEYS),
    Row("server key", (), make_web("key"), serve, named=True, places=KEYS),
    Row("authorities of clients", (), make_web("ca"), serve, named=True, places=KEYS),
    Row(
        "audit log",
        (
            "reconciler/audit.py:AuditLog.__init__",
            "reconciler/audit.py:AuditLog._write",
            "reconciler/audit.py:read_transitions",
        ),
        at("audit.log", write_audit),
        again(explain),
        named=True,
        cut="each line is a record of its own; what a full disk cuts is in tests/unit/test_appended_lines.py",
        silent="explain prints that it found no transition",
    ),
    Row(
        "resolv.conf",
        ("common/web/hosts.py:own_names",),
        text("resolv.conf", "nameserver 127.0.0.1\nsearch a.example b.example\n"),
        again(lambda path: own_names("n0", path) if len(own_names("n0", path)) > 1 else CLOSED),
        named=True,
        cut="a search domain that is missing or cut makes one more name that is refused",
        silent="it only adds names of this machine",
    ),
    Row(
        "journal of actions",
        ("reconciler/texts.py:TextFiles.read_text", "reconciler/texts.py:TextFiles.write_text"),
        at("reconciler-journal.json", write_journal),
        again(lambda path: Journal(texts_in(path.parent)).read()),
        write=write_journal,
    ),
    Row(
        "record of decisions",
        (),
        at("reconciler-record.json", write_record),
        again(load_record),
        write=lambda path: write_record(path, "id2"),
    ),
    Row(
        "reconciler.lock",
        ("reconciler/texts.py:TextFiles.__init__",),
        text("reconciler.lock", "", 0o600),
        again(lock_texts),
    ),
    Row(
        "pause",
        ("reconciler/pause.py:PauseFile.read_pause", "reconciler/pause.py:PauseFile.write_pause"),
        at("pause", write_pause),
        again(lambda path: PauseFile(path).read_pause()),
        write=lambda path: write_pause(path, WALL + 3600),
    ),
    Row(
        "answer kept by report",
        ("reports/history/kept.py:Folder.get", "reports/history/kept.py:Folder.put"),
        lambda folder: keep_answer(folder, '{"status": "success"}'),
        again(lambda path: json.loads(Folder(path.parent).get("query") or "")),
        named=True,
        write=lambda path: keep_answer(path.parent, json.dumps([0.1 * n for n in range(1000)])),
    ),
    Row(
        "textfile, and FILE of --output and record",
        (
            "agent/runtime/once.py:_deliver",
            "agent/runtime/once.py:_fail",
            "agent/runtime/record.py:record",
            "agent/runtime/serve.py:_try_to_write",
            "agent/runtime/serve.py:write_textfiles.tick",
            "reports/usage/deliver.py:put",
        ),
        text("gpu.prom", "gpu_up 1\n"),
        write=lambda path: write_atomically(path, b"gpu_up 0\n" * 1000),
    ),
)
PROC = "the kernel's file, of bounded size"
NO_FILE = "opens no file"
IN_MEMORY = "files in memory, of what was read"
SHARED_READERS = "called by the functions of the rows"
# Functions that open something else, each with the reason.
EXEMPT = {
    "agent/attribution/kubelet/alive.py:find_own_pod": PROC,
    "agent/attribution/kubelet/podresources.py:_take_text": NO_FILE,
    "agent/attribution/kubelet/podresources.py:_parse_container": NO_FILE,
    "agent/attribution/kubelet/podresources.py:_parse_devices": NO_FILE,
    "agent/attribution/kubelet/podresources.py:_parse_dynamic": NO_FILE,
    "agent/attribution/kubelet/podresources.py:_parse_pod": NO_FILE,
    "agent/attribution/registry.py:runs_slurmd": PROC,
    "agent/attribution/slurm/gres/mig_caps.py:read_caps": PROC,
    "agent/attribution/slurm/on_node/job_files.py:read_ended": "opens the directory of the files",
    "agent/attribution/slurm/on_node/job_files.py:read_job_files": "opens the directory of the files",
    "agent/attribution/slurm/on_node/job_files.py:read_trusted": "opens the directory of the file",
    "agent/devices/kmsg.py:KernelLog.__init__": "the kernel log is a device; a read of it takes one record",
    "agent/devices/nvml/backend.py:NvmlBackend.open": NO_FILE,
    "agent/devices/nvml/recording.py:Recorder.open": NO_FILE,
    "agent/inventory/pci.py:_text": PROC,
    "agent/ledger/state.py:read_boot_id": PROC,
    "agent/sampling/driver.py:Driver.ask": NO_FILE,
    "agent/sampling/reader.py:Readers._open": NO_FILE,
    "cli/output.py:prepare_streams": "/dev/null, and standard input",
    "common/fetch.py:fetch_text": NO_FILE,
    "common/files.py:in_memory": SHARED_READERS,
    "common/files.py:open_log": SHARED_READERS,
    "common/files.py:append_line": SHARED_READERS,
    "common/files.py:lock_kept": SHARED_READERS,
    "common/files.py:open_named": SHARED_READERS,
    "common/files.py:open_regular": SHARED_READERS,
    "common/files.py:read_gzip": SHARED_READERS,
    "common/files.py:read_kept": SHARED_READERS,
    "common/files.py:read_named": SHARED_READERS,
    "common/files.py:read_own": SHARED_READERS,
    "common/files.py:write_atomically": SHARED_READERS,
    "common/procfs.py:Procfs.boot_wall": PROC,
    "common/procfs.py:Procfs.text": PROC,
    "common/promql/client.py:_build": IN_MEMORY,
    "common/web/secure.py:Security._build": IN_MEMORY,
    "diagnosis/host/cgroup_files.py:CgroupFiles.text": PROC,
    "diagnosis/host/cgroup_files.py:read_text": PROC,
    "diagnosis/training/files.py:TrainingReader.read": PROC,
    "diagnosis/training/files.py:TrainingReader._find": "opens the directories on the way to a report",
    "diagnosis/training/files.py:_open_below": "opens the directories on the way to a report",
    "reconciler/actions/journal.py:Journal._write": "TextFiles, or a Lease",
    "reconciler/actions/journal.py:Journal.read": "TextFiles, or a Lease",
    "reconciler/actions/record.py:Record._load": "TextFiles, or a Lease",
    "reconciler/actions/record.py:Record._save": "TextFiles, or a Lease",
    "reconciler/kubernetes/client/api.py:is_in_cluster": "files of the kubelet in the own container, read by the client",
}
