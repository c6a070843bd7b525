"""Compares the GPU-seconds of a report with sacct, by account."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass, field

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.model.holders import ALLOCATION_KEY
from gpu_exporter.common.promql.absence import BUILD
from gpu_exporter.reports.accounting.reasons import AccountTime, SeenNodes, suspended_s
from gpu_exporter.reports.history.asking import History, WindowSpan, over
from gpu_exporter.reports.jobs.sacct import Period
from gpu_exporter.reports.usage.cells import WINDOW_S
from gpu_exporter.reports.usage.model import UsageReport
from gpu_exporter.reports.usage.render.words import coverage

STEP_S = 60.0  # between two looks at the shares
ROUNDED_S = 2.0  # a query has whole seconds, so the ends of its windows differ by less
ALL = "(all)"
HASH = re.compile("[0-9a-f]{16}")  # of identity.user: hmac
OF_JOBS = 'job_id!=""'
JOB = "job "  # before the id in the name of a holder


@dataclass
class AccountHours:
    """The time of each account. `notes`: texts about missing or doubtful data."""

    start: float
    end: float
    accounts: dict[str, AccountTime] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, account: str) -> AccountTime:
        return self.accounts.setdefault(account, AccountTime())

    @property
    def total(self) -> AccountTime:
        return AccountTime(*map(sum, zip(*map(astuple, self.accounts.values()), strict=True)))


def compare(
    report: UsageReport, history: History, matcher: str, *, is_own: bool, clock: Clock = SYSTEM_CLOCK
) -> AccountHours:
    """Compares a report with sacct's runs in the same period. `is_own`: the report's hours are from gpu-exporter's
    counters.

    Raises AnswerError.
    """
    lines = {who: use for who, use in report.lines.items() if who.scheduler == "slurm"}
    if len(clusters := {who.cluster for who in lines}) > 1:
        names = ", ".join(sorted(clusters))
        raise AnswerError(
            f"the hours are of the clusters {names}, but sacct knows one: add --source.matcher 'cluster=\"NAME\"'"
        )
    found = AccountHours(report.start, report.end, notes=_list_notes(report, is_own=is_own))
    length = report.end - report.start
    span = WindowSpan(report.start, report.end, length / math.ceil(length / WINDOW_S))
    seen = SeenNodes(_read_nodes(history, matcher, span) if is_own else {})
    jobs = {who.holder.removeprefix(JOB): "" for who in lines if not who.account and who.holder.startswith(JOB)}
    users, total = set[str](), 0
    period = Period(report.start, report.end, clock)
    for run, is_new in period.read():
        total += is_new
        if run.raw in jobs:
            jobs[run.raw] = run.account
        if run.gpus and (run.elapsed_s or suspended_s(run)):
            users.add(run.user)
            found.of(run.account).add(run, seen.unseen(run) if is_own else 0.0, is_new=is_new)
    unread = [f"{period.unread} lines of sacct cannot be read, and their GPU-seconds are missing"] * bool(period.unread)
    if not users:
        why = ", but none with GPUs: set AccountingStorageTRES=gres/gpu in slurm.conf" if total else ""
        raise AnswerError("; ".join((f"sacct shows this user {total} runs in this period{why}", *unread)))
    for who, use in lines.items():
        found.of(who.account or jobs.get(who.holder.removeprefix(JOB), "")).held += 3600.0 * use.held
    for account, seconds in (_read_parts(history, matcher, span) if is_own else {}).items():
        found.of(account).parts += seconds
    if is_own and not seen.is_of_slurm:
        found.notes.append(
            "no node has the same name in Slurm and in the label `node`, so time on nodes without an exporter is not "
            "shown"
        )
        for each in found.accounts.values():
            each.unseen = 0.0
    found.notes += filter(None, [history.describe_skipped()])
    if any(HASH.fullmatch(who.account) for who in lines):
        found.notes.append(f"accounts are hashes in the series (identity.user): compare only the line {ALL}")
    found.notes += unread
    if len(users) == 1:
        found.notes.append(
            f"sacct shows only runs of {', '.join(users)}: if PrivateData is set, run this command as SlurmUser"
        )
    return found


def _list_notes(report: UsageReport, *, is_own: bool) -> list[str]:
    """Returns those notes of the report that are about hours."""
    about_hours = [text for text in report.missing if "hours" in text.partition(":")[0]]
    is_partial = report.covered is not None and not report.covered.is_whole
    return [*([coverage(report)] if is_partial else []), *([] if is_own else report.left_out), *about_hours]


def _read_nodes(history: History, matcher: str, span: WindowSpan) -> dict[str, tuple[float, float]]:
    """Returns the first and the last hour with a sample of an exporter, by node (Unix seconds)."""
    expression = f"max by (node) ({over('max', f'{BUILD}{{{matcher}}}', span.window)})"
    table = history.ask_table("nodes", expression, span)
    return {
        dict(labels).get("node", ""): (min(windows) - ROUNDED_S, max(windows) + span.window + ROUNDED_S)
        for labels, windows in table.items()
        if windows
    }


def _read_parts(history: History, matcher: str, span: WindowSpan) -> dict[str, float]:
    """Returns by account how much the exporters' GPU-seconds exceed Slurm's for parts of GPUs. Slurm counts a gres/gpu
    for each MIG instance, and for each of several jobs on one GPU. It counts nothing for shards and MPS.
    """
    key = ", ".join(("cluster", "node", *ALLOCATION_KEY))

    def select(name: str, *matchers: str) -> str:
        return f"{name}{{{','.join(filter(None, (matcher, *matchers, OF_JOBS)))}}}"

    def info(shares: str) -> str:
        chosen = select("gpu_allocation_info", f'share=~"{shares}"')
        return f"max by ({key}, account) ({chosen})"

    ratio = f"max by ({key}) ({select('gpu_allocation_share_ratio')})"
    window = f"[{1000 * span.window - 1:.0f}ms:{STEP_S:.0f}s]"
    queries = {
        "held": f"{ratio} * on ({key}) group_left (account) {info('mig|time_slice|shard|mps')}",
        "counted": info("mig|time_slice"),
    }
    looks = {name: f"sum_over_time((sum by (account) ({each})){window})" for name, each in queries.items()}
    tables = history.ask_tables(looks, span)
    found: dict[str, float] = {}
    for name, seconds in (("held", STEP_S), ("counted", -STEP_S)):
        for labels, windows in tables[name].items():
            account = dict(labels).get("account", "")
            found[account] = found.get(account, 0.0) + seconds * sum(windows.values())
    return found
