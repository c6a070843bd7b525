"""Which jobs have a step on this node, without a question to the controller.

`scontrol listpids` asks the slurmstepds of this node over sockets in SlurmdSpoolDir: it answers while slurmctld and
slurmd are down, needs no right, and names jobs by number, also where processes stay in slurmd's cgroup
(proctrack/linuxproc) or cgroups are called by SLUID (tried on 22.05.8 and 24.11.5). Where one slurmstepd is just
starting, or has died and left its socket, it ends with status 1: after the list of the others (22.05.8, 26.05), or
without any (24.11.5). A job between its prolog and its
first step is not in it, unless PrologFlags has Contain: then each job has an extern step from its start to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.attribution.procfs import STOPPED, Procfs
from gpu_exporter.attribution.slurm.parse import parse_listpids
from gpu_exporter.attribution.source import CommandFailed

# What it ends with (status 1) where there is no step, on all releases tried.
NO_STEPS = "No job steps exist on this node"
REFUSED = "Unable to connect to slurmstepd"


class Steps(NamedTuple):
    """The jobs that have a step here: of each the processes, and those of which no process may run.

    `unseen`: why there may be more, "" where these are all.
    """

    pids: Mapping[str, frozenset[int]]
    stopped: frozenset[str] = frozenset()
    unseen: str = ""


class StepReader:
    """Asks for the steps of one node. `procfs`: the host's /proc, to see that a job is stopped."""

    def __init__(self, node: str, ask: Callable[[Sequence[str]], str], procfs: Procfs) -> None:
        self._node = node
        self._ask = ask
        self._procfs = procfs
        self._listed: Mapping[str, frozenset[int]] = {}  # when all steps were listed last

    def read(self) -> Steps:
        """The steps of this moment. Raises SourceError where they cannot be seen."""
        unseen = ""
        try:
            out = self._ask(("scontrol", "listpids", "*", self._node))
        except CommandFailed as exc:
            if NO_STEPS in str(exc):
                self._listed = {}
                return Steps({})
            if REFUSED not in str(exc):
                raise
            out, unseen = exc.out, str(exc)
        pids = parse_listpids(out)
        if not self._procfs.is_host():
            return Steps(pids, unseen=unseen)  # these numbers mean other processes here
        if not unseen:
            self._listed = pids
        # A step that is not listed may run: a job is stopped if all are that were listed when none was missing.
        stopped = frozenset(job for job, numbers in self._listed.items() if self._is_stopped(numbers))
        return Steps(pids, stopped, unseen)

    def _is_stopped(self, pids: frozenset[int]) -> bool:
        """Whether all that could run is stopped, which takes one process that is seen."""
        seen = False
        for pid in pids:
            stat = self._procfs.stat(pid)
            if stat is None:
                continue
            if stat.state != STOPPED:
                return False
            seen = True
        return seen
