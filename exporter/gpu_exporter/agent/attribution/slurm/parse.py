"""Parses the output of Slurm's commands. Pure.

The parser uses only text that a job's owner cannot forge:

- Columns of squeue that Slurm and its administrators fill.
- The record of a node.
- JSON, in which a job's name or comment cannot imitate another field.

The plain text of `scontrol show job` contains names and comments without escapes. The parser uses this text only as a
last resort, and ignores an ambiguous record (docs/decisions/0001).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.outside import WHOLE_MAX, need_real, need_whole, whole
from gpu_exporter.common.slurm.answers import read_jobs
from gpu_exporter.common.slurm.gres import GRES, UNSET, Gres, add_devices, parse_gres, split_gres
from gpu_exporter.common.slurm.hostlist import parse_names

# Column widths. Slurm cuts longer values, so the widths are far above any real value.
COLUMNS = (
    "JobID",
    "UserName",
    "Account",
    "Partition",
    "QOS",
    "State",
    "StartTime",
    "RestartCnt",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "NumNodes",
    "NumCPUs",
    "tres-alloc",
    "UserID",
)
SQUEUE_FORMAT = ",".join(f"{column}:256|" for column in COLUMNS)
SINFO_WIDTH = 8192
REASON_MAX = 200  # characters of an administrator's text about a node
SINFO_FORMAT = f"GresUsed:{SINFO_WIDTH}|,StateComplete:256|,Reason:256|"
SINFO_ROW = re.compile(r"[^|]*\|[A-Za-z_+*~#!%$@^ -]*\|")  # not a further line of a reason
# Slurm's words for the state of a node on which no job may start, in the order of weight. A node that waits for a
# planned job (PLANNED), or that Slurm can power up, is open.
CLOSED = {
    "down": frozenset(
        ("DOWN", "ERROR", "FAIL", "FAILING", "NOT_RESPONDING", "INVAL", "INVALID_REG", "UNKNOWN", "FUTURE")
    ),
    "drained": frozenset(("DRAIN",)),
    "reserved": frozenset(("RESERVED", "MAINTENANCE", "MAINT", "BLOCKED")),
}


class Job(NamedTuple):
    """One row of squeue. `start`: Unix seconds, None while unknown. `size` changes when the job is resized."""

    job_id: str
    user: str
    account: str
    partition: str
    qos: str
    state: str
    start: float | None
    restarts: str
    array_job_id: str = ""
    array_task_id: str = ""
    het_job_id: str = ""
    het_job_offset: str = ""
    size: tuple[str, ...] = ()
    uid: str = ""


def parse_squeue(text: str) -> list[Job]:
    """Parses the output of `squeue -h -O SQUEUE_FORMAT` under SLURM_TIME_FORMAT=%s.

    Skips lines that it cannot parse; the GPUs of these jobs then have no holder. Raises SourceError if it can parse no
    line.
    """
    jobs: list[Job] = []
    odd = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")][:-1]
        if len(cells) != len(COLUMNS) or not _is_number(cells[0]):
            odd = odd or line
            continue
        known = ["" if cell in UNSET else cell for cell in cells]
        array_job, array_task, het_job, het_offset = known[8:12]
        jobs.append(
            Job(
                job_id=known[0],
                user=known[1],
                account=known[2],
                partition=known[3],
                qos=known[4],
                state=known[5],
                start=need_real(known[6]) if _is_number(known[6]) else None,
                restarts=known[7] or "0",
                # 22.05 and 24.11 print the job's own id as ArrayJobID outside of arrays; only tasks have a number.
                array_job_id=array_job if _is_number(array_task) else "",
                array_task_id=array_task if _is_number(array_task) else "",
                het_job_id=het_job if _is_number(het_job) and het_job != "0" else "",
                het_job_offset=het_offset if _is_number(het_job) and het_job != "0" else "",
                size=tuple(known[12:15]),
                uid=known[15],
            )
        )
    if odd and not jobs:
        raise SourceError(f"cannot parse a line of squeue: {odd.strip()[:80]!r}")
    return jobs


def parse_listpids(text: str) -> dict[str, frozenset[int]]:
    """Returns the pids of each job id in the output of `scontrol listpids`. Reads only the columns PID and JOBID.

    The extern step has no process of its own (pid -1), but its job is in the result. Skips lines that it cannot parse.
    Raises SourceError if it can parse no line.
    """
    pids: dict[str, set[int]] = {}
    odd = ""
    for line in text.splitlines()[1:]:
        cells = line.split()
        if not cells:
            continue
        if len(cells) < 3 or not _is_number(cells[0].removeprefix("-")) or not _is_number(cells[1]):
            odd = odd or line
            continue
        pid = whole(cells[0], WHOLE_MAX)  # None for -1
        pids.setdefault(cells[1], set()).update(() if pid is None else (pid,))
    if odd and not pids:
        raise SourceError(f"cannot parse a line of scontrol listpids: {odd.strip()[:80]!r}")
    return {job: frozenset(numbers) for job, numbers in pids.items()}


def _is_number(text: str) -> bool:
    return whole(text, WHOLE_MAX) is not None


class JobGpus(NamedTuple):
    """The GPUs (IDX) of a job on one node, and the number of its GPUs on all nodes.

    - `total`: number of GPUs of which the job has all or a part; None if Slurm does not report the GPU of a part.
    - `unnamed`: number of GPUs on this node that Slurm counts without an IDX.
    - `shared`: GPUs of which the job has a part, and how they are divided (shard, mps).
    - `unnamed_share`: Slurm's item for a part of a GPU, if it does not name the GPU.
    """

    indexes: tuple[int, ...]
    total: int | None
    unnamed: int = 0
    shared: tuple[tuple[int, str], ...] = ()
    unnamed_share: str = ""

    def positions(self) -> tuple[int, ...]:
        """Returns every IDX at which the job has a GPU or a part of a GPU."""
        return tuple(index for index, _ in self.parts())

    def parts(self) -> tuple[tuple[int, str], ...]:
        """Returns every IDX at which the job has a GPU, with "" for a whole GPU, and otherwise how it is divided."""
        return (*((index, "") for index in self.indexes), *self.shared)


def parse_job_gpus(text: str, node: str) -> dict[str, JobGpus]:
    """Returns the GPUs on `node` of every running job in the output of `squeue --json` or `scontrol show job --json`.

    `gres_detail` has one entry for each of the job's nodes, in their order. Skips a job whose record cannot be parsed.
    Raises SourceError if the text is not such an output.
    """
    try:
        jobs, _ = read_jobs(text, lambda row: (str(need_whole(row["job_id"])), _read_gpus(row, node)))
    except ValueError as exc:
        raise SourceError(str(exc)) from exc
    return {job_id: gpus for job_id, gpus in jobs if gpus is not None}


def _read_gpus(row: dict[str, Any], node: str) -> JobGpus | None:
    """Returns one job's GPUs. None while the job has no nodes: its GPUs are then unknown."""
    by_node = divide_gpus(row["nodes"], row["gres_detail"])
    if not by_node:
        return None
    return by_node.get(node) or JobGpus((), next(iter(by_node.values())).total)


def divide_gpus(names: Any, details: Any) -> dict[str, JobGpus]:
    """Returns the GPUs of a job on each node. `details` has one entry for each node, in the order of `names`, or is
    empty.

    Raises TypeError or ValueError if an argument cannot be parsed.
    """
    if not isinstance(names, str) or not isinstance(details, list):
        raise TypeError("nodes is not a text, or gres_detail is not a list")
    nodes = parse_names(names)
    gres = [parse_gres(str(detail)) for detail in details] or [Gres()] * len(nodes)
    if len(gres) != len(nodes):
        raise ValueError("gres_detail does not have one entry for each node")
    total = add_devices(gres)
    return {
        node: JobGpus(own.indexes, total, own.unnamed, own.shared, own.unnamed_share)
        for node, own in zip(nodes, gres, strict=True)
    }


class NodeRecord(NamedTuple):
    """The GPUs of a node and the GPUs in use, from `scontrol show node -d`.

    - `configured`: (type, count) in the order of slurm.conf.
    - `used`: the GPUs in use. If GPUs have no type, Slurm may print only their number without positions.
    - `slurmd_start`: Unix seconds, None if missing.
    - `closed`: a key of CLOSED if Slurm starts no job on the node, except for the users of a reservation; "" otherwise.
    - `reason`: the administrator's text about a closed node, "" if there is none.
    """

    configured: tuple[tuple[str, int], ...]
    used: Gres
    slurmd_start: float | None = None
    closed: str = ""
    reason: str = ""


def parse_node(text: str) -> NodeRecord:
    """Parses the record of one node, printed under SLURM_TIME_FORMAT=%s. Raises SourceError if it has no GresUsed."""
    used = _field(text, r"^\s*GresUsed=(\S*)\s*$")
    if used is None:
        raise SourceError("scontrol show node -d prints no GresUsed, so the exporter cannot see which GPUs are free")
    configured = _field(text, r"^\s*Gres=(\S*)\s*$") or ""
    start = _field(text, r"\bSlurmdStartTime=(\d+)\b")
    try:
        record = read_node(configured, used, None if start is None else need_real(start))
    except ValueError as exc:
        raise SourceError(f"scontrol show node -d: {exc}") from exc
    state, reason = (
        _field(text, r"^\s*State=(\S+)") or "",
        _field(text, r"^\s*Reason=(.*?)(?: \[[^\[\]]*\])?\s*$") or "",
    )
    return close_node(record, state, reason)


def read_node(configured: str, used: str, slurmd_start: float | None) -> NodeRecord:
    """Returns a record made from two texts in Slurm's GRES notation: all GPUs, and GPUs in use. Raises ValueError."""
    return NodeRecord(_configured(configured), parse_gres(used), slurmd_start)


def close_node(record: NodeRecord, state: str, reason: str) -> NodeRecord:
    """Returns the record with the node's state, in Slurm's words such as `IDLE+DRAIN`, `DOWN*` or `idle+reserved`.

    `reason`: the administrator's text. It remains after the node is open again.
    """
    words = set(re.findall("[A-Z_]+", state.upper()))
    if "*" in state:
        words.add("NOT_RESPONDING")
    closed = next((name for name, of_it in CLOSED.items() if words & of_it), "")
    is_given = closed and reason.strip().casefold() not in ("", "none", "(null)")
    return record._replace(closed=closed, reason=reason.strip()[:REASON_MAX] if is_given else "")


def parse_sinfo(text: str, record: NodeRecord) -> NodeRecord:
    """Returns the node's record with its present use and state, from `sinfo -h -N -n NODE -O SINFO_FORMAT`.

    sinfo prints a line for each partition, and the line breaks of a reason as they are. Raises SourceError if the
    output cannot be parsed.
    """
    rows: list[str] = []
    for line in text.split("\n"):
        if rows and not SINFO_ROW.match(line):
            rows[-1] += f" {line}"
        elif line.strip():
            rows.append(line)
    lines = [row.split("|", 2) for row in rows]
    cells = {line[0].strip() for line in lines}
    if len(cells) != 1 or len(lines[0]) < 3 or not (cell := cells.pop()) or len(cell) >= SINFO_WIDTH:
        raise SourceError("sinfo prints no GresUsed for this node, so the exporter cannot see which GPUs are free")
    _, state, reason = lines[0]
    try:
        return close_node(record._replace(used=parse_gres(cell)), state, reason.rpartition("|")[0])
    except ValueError as exc:
        raise SourceError(f"sinfo: {exc}") from exc


def _configured(text: str) -> tuple[tuple[str, int], ...]:
    matches = [match for item in split_gres(text) if (match := GRES.fullmatch(item)) and match["name"] == "gpu"]
    return tuple(
        ((match["type"] or "").lower().replace("(null)", ""), need_whole(match["count"] or 1)) for match in matches
    )


def _field(text: str, pattern: str) -> str | None:
    match = re.search(pattern, text, flags=re.MULTILINE)
    return match[1] if match else None


class SlurmConfig(NamedTuple):
    """Settings from `scontrol show config`: names as Slurm prints them, lists in lower case, "" if missing."""

    cluster: str
    path: str
    spool: str
    private: frozenset[str]
    prolog_flags: frozenset[str] = frozenset()


def parse_config(text: str) -> SlurmConfig:
    """Returns the settings that attribution needs, from the output of `scontrol show config`."""

    def value(name: str) -> str:
        return _field(text, rf"^{name}\s*=\s*(.*?)\s*$") or ""

    def words(name: str) -> frozenset[str]:
        return frozenset(word.strip().lower() for word in value(name).split(",") if word.strip())

    return SlurmConfig(
        value("ClusterName"), value("SLURM_CONF"), value("SlurmdSpoolDir"), words("PrivateData"), words("PrologFlags")
    )


def parse_clock(text: str) -> float | None:
    """Returns slurmctld's time in the output of `scontrol show config` (whole Unix seconds), None if missing.

    The command must run under SLURM_TIME_FORMAT=%s.
    """
    wall = whole(_field(text, r"^Configuration data as of (\S+)\s*$") or "", WHOLE_MAX)
    return None if wall is None else wall + 0.0


_DETAILS = re.compile(r"JOB_GRES=\S+(?:\s+Nodes=\S+ CPU_IDs=\S* Mem=\S+ GRES=\S*)+\s*")
_DETAIL = re.compile(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)")
_RECORD = re.compile(r"\n(?=JobId=\d+ )")


def parse_job_text(text: str, job_id: str, node: str) -> JobGpus | None:
    """Returns the GPUs of a job from `scontrol -o show job -d ID`, for a Slurm that is built without JSON.

    Accepts only a single record that has a plain device list at the place where Slurm prints it. None for any other
    text, because the job's name or comment may imitate a device list. The GPUs then have a holder without a name.
    """
    records = [record for record in _RECORD.split(text) if record.startswith(f"JobId={job_id} ")]
    if len(records) != 1:
        return None
    before, found, rest = records[0].partition("JOB_GRES=")
    details, ended, after = rest.partition("MinCPUsNode=")
    if not found:
        return JobGpus((), 0) if records[0].count("MinCPUsNode=") == 1 and not _DETAIL.search(before) else None
    if not ended or "JOB_GRES=" in rest or "MinCPUsNode=" in before + after or _DETAIL.search(before + after):
        return None
    if not _DETAILS.fullmatch(found + details):
        return None
    own = Gres()
    lists: list[Gres] = []
    try:
        for hosts_text, gres_text in _DETAIL.findall(details):
            hosts, gres = parse_names(hosts_text), parse_gres(gres_text)
            lists += [gres] * len(hosts)
            if node in hosts:
                own = gres
    except ValueError:
        return None
    return JobGpus(own.indexes, add_devices(lists), own.unnamed, own.shared, own.unnamed_share)
