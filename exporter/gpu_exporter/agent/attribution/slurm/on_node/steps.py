"""Finds the jobs that have a step on this node, without asking slurmctld.

`scontrol listpids` asks the slurmstepds of this node over sockets in SlurmdSpoolDir. The command works while slurmctld
and slurmd are down, and needs no rights. The command prints job numbers, even if processes remain in slurmd's cgroup
(proctrack/linuxproc) or cgroups are named by SLUIDs (tried on 22.05.8 and 24.11.5).

If one slurmstepd is just starting, or has died and left its socket, the command exits with status 1. Slurm 22.05.8 and
26.05 first print the list of the other jobs; 24.11.5 prints no list. A job between its prolog and its first step is not
listed, except with PrologFlags=Contain, which gives each job an extern step from start to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.parse import parse_listpids
from gpu_exporter.agent.attribution.source import CommandFailed
from gpu_exporter.common.procfs import STOPPED, Procfs

# The command's error text (status 1) if there is no step, on all releases tried.
NO_STEPS = "No job steps exist on this node"
REFUSED = "Unable to connect to slurmstepd"


class Steps(NamedTuple):
    """The processes of each job that has a step here. `stopped`: jobs of which all processes are stopped.

    `unseen`: why there may be more jobs, "" if the list is complete.
    """

    pids: Mapping[str, frozenset[int]]
    stopped: frozenset[str] = frozenset()
    unseen: str = ""


class StepReader:
    """Reads the steps on one node. `procfs`: the host's /proc, to detect stopped jobs."""

    def __init__(self, node: str, ask: Callable[[Sequence[str]], str], procfs: Procfs) -> None:
        self._node = node
        self._ask = ask
        self._procfs = procfs
        self._listed: Mapping[str, frozenset[int]] = {}  # the last complete list

    def read(self) -> Steps:
        """Returns the present steps. Raises SourceError if they are not visible."""
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
            return Steps(pids, unseen=unseen)  # these pids mean other processes here
        if not unseen:
            self._listed = pids
        # A step that is not listed may run. So a job is stopped if all processes of the last complete list are stopped.
        stopped = frozenset(job for job, numbers in self._listed.items() if self._is_stopped(numbers))
        return Steps(pids, stopped, unseen)

    def _is_stopped(self, pids: frozenset[int]) -> bool:
        """Returns whether at least one of these processes is visible, and all visible processes are stopped."""
        seen = False
        for pid in pids:
            stat = self._procfs.stat(pid)
            if stat is None:
                continue
            if stat.state != STOPPED:
                return False
            seen = True
        return seen
