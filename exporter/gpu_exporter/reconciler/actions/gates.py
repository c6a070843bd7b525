"""The conditions before an action. Each gate checks one condition, and raises Refused with the reason if it fails."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Actions as Settings
from gpu_exporter.common.durations import describe_duration, format_duration
from gpu_exporter.reconciler.actions.proofs import KNOWN_MIN, NOT_KNOWN, Proofs, Warned, Work
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.actions.record import PolicyStanding, Record
from gpu_exporter.reconciler.decision.outcomes import REGRET_S, account_of, shortest_run
from gpu_exporter.reconciler.decision.policy import Decision, describe_cores
from gpu_exporter.reconciler.decision.target import Skipped, Target
from gpu_exporter.reconciler.evidence.records import HolderName, HostLimits
from gpu_exporter.reconciler.marks import Refused

ACT_FRESH_S = 60.0  # seconds; the holder may have begun to work since older evidence was read


class Gates:
    """The gates. The runner calls them in the order of the methods below."""

    def __init__(self, settings: Settings, proofs: Proofs, record: Record, host: HostLimits, clock: Clock) -> None:
        """`host`: a holder above these limits counts as working on its host."""
        self._settings = settings
        self._proofs = proofs
        self._record = record
        self._host = host
        self._clock = clock

    def object_to_warnings(
        self, proposal: Proposal, warnings: Mapping[HolderName, Warned]
    ) -> Mapping[HolderName, Warned]:
        wall, needed_s = self._clock.wall(), self._settings.warned_for
        for decision in proposal.decisions:
            if decision.name not in warnings:
                why = f"Alertmanager does not send an alert about {decision.title} to any receiver"
                raise Refused("not_warned", why)
            since_wall = warnings[decision.name].since_wall
            if since_wall < (decision.start_wall or 0.0):
                why = f"the alert is older than {decision.title}, so it warned an earlier holder of this name"
                raise Refused("not_warned", why)
            lasted_s = wall - since_wall
            if lasted_s < needed_s:
                since = describe_duration(max(0.0, lasted_s))
                raise Refused(
                    "not_warned", f"the owner was warned {since} ago; the policy requires {format_duration(needed_s)}"
                )
        return {name: warnings[name] for name in proposal.names}

    def object_to_record(self, proposal: Proposal) -> PolicyStanding | None:
        """Raises Refused unless the record of the policies allows an action. Returns the record; None if the site's
        setting `override` replaces it.

        Even with `override`, a group keeps its GPUs for the first hour after it became underused.
        """
        for decision in proposal.decisions:
            needed_s = (decision.windows.underused_s if decision.windows is not None else 0.0) + REGRET_S
            if shortest_run(decision) < needed_s:
                since = describe_duration(REGRET_S)
                raise Refused("watched", f"{decision.title} became underused less than {since} ago")
        if self._record.watches.is_open(proposal.decisions):
            why = "the result of an earlier decision on this target is not known yet"
            raise Refused("watched", why)
        if self._settings.override:
            return None
        found: list[PolicyStanding] = []
        for account in sorted({account_of(decision) for decision in proposal.decisions}):
            answer = self._record.why_not(account, self._settings)
            if isinstance(answer, Skipped):
                raise Refused(*answer)
            found.append(answer)
        return min(found)

    def object_to_work(self, proposal: Proposal, target: Target) -> None:
        """Raises Refused if a member without GPUs works, or if a holder works on its host.

        Raises AnswerError.
        """
        settings = self._settings
        idle_s = self._clock.wall() - proposal.since_wall
        if target.beside:
            self._object_to_beside(target, idle_s)
        if settings.host_work_max and idle_s >= settings.host_work_max:
            return
        works = self._proofs.read_host_work(proposal.names)
        for name, decision in sorted((each.name, each) for each in proposal.decisions):
            for node in sorted({unit.node for unit in decision.units}):
                work = works.get(name, {}).get(node, NOT_KNOWN)
                if said := self._describe_work(work, decision.windows.cores if decision.windows else math.inf):
                    raise Refused(
                        "host_work", f"{decision.title} {said} on {node}, so the reconciler takes none of its GPUs back"
                    )

    def _describe_work(self, work: Work, cores_min: float) -> str:
        """Returns the work of a holder on its host, in words; "" for none. Unknown activity counts as work.
        `cores_min`: a holder that uses this many CPU cores counts as working.
        """
        if work.cpu is None:
            return "has unknown CPU use (set agent.hostActivity in the chart, --path.cgroup, or actions.host_work_max)"
        if work.cpu > self._host.cpu_ratio:
            return f"uses {work.cpu:.0%} of its CPUs"
        if work.cpu * (work.cpus or 0.0) >= cores_min:
            return describe_cores(work.cpu * (work.cpus or 0.0), work.cpus or 0.0)
        if (work.io_bytes_per_s or 0.0) > self._host.io_bytes_per_s:
            return f"moves {(work.io_bytes_per_s or 0.0) / 1e6:.0f} MB/s to and from disks"
        return ""

    def _object_to_beside(self, target: Target, idle_s: float) -> None:
        pods = {part.name.name for part in target.beside if part.name.scheduler == "kubernetes"}
        rest = self._proofs.read_rest(target.namespace, pods, idle_s) if pods else {}
        wall = self._clock.wall()
        for part in target.beside:
            ends = f"the action would also end {part.name}, a member without GPUs"
            if wall - part.start_wall < KNOWN_MIN * idle_s:  # the series may be those of an earlier pod with its name
                why = f"its activity is unknown, because it is younger than {KNOWN_MIN:.0%} of the idle time"
                raise Refused("beside", f"{ends}: {why}")
            work = rest.get(part.name.name, NOT_KNOWN)
            if work.cpu is None or work.io_bytes_per_s is None:
                raise Refused("beside", f"{ends}: Prometheus lacks its CPU use or its disk traffic in the idle time")
            if work.cpu > self._settings.beside_cpu:
                raise Refused("beside", f"{ends}: it used {work.cpu:.2f} CPUs in the idle time")
            if work.io_bytes_per_s > self._settings.beside_io:
                moved = f"{work.io_bytes_per_s / 1e6:.0f} MB/s"
                raise Refused("beside", f"{ends}: it read and wrote {moved} in the idle time")

    def object_to_grace(self, target: Target) -> None:
        """Raises Refused if a member can run for longer than actions.grace_max after it was told to end."""
        most_s = self._settings.grace_max
        for part in target.ends:
            if part.grace_s > most_s:
                grace = format_duration(part.grace_s) if math.isfinite(part.grace_s) else "an unknown time"
                why = f"{part.name} may run for {grace} after the request to end, but actions.grace_max allows"
                raise Refused("grace", f"{why} {format_duration(most_s)}")

    def object_to_age(self, fresh: Mapping[HolderName, Decision]) -> None:
        """Raises Refused if the last sample of any GPU is older than ACT_FRESH_S."""
        wall = self._clock.wall()
        for decision in fresh.values():
            ages = [max(0.0, unit.sample_age_s) for unit in decision.units if unit.sample_age_s is not None]
            if len(ages) < len(decision.units) or wall - decision.observed_wall + max(ages) > ACT_FRESH_S:
                raise Refused("stale", f"a sample of {decision.title} is older than {ACT_FRESH_S:.0f} s")
