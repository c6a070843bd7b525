"""The record of each policy: the outcomes of its last decisions, by class and tenant. The record survives restarts.

A policy may act only with a good record, from at least three tenants. The reconciler does not act on a tenant with too
many regrets. `_pool` keeps a few tenants from changing the record for the others.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import socket
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.outside import need_real, need_wholes
from gpu_exporter.reconciler.actions.journal import parse, render
from gpu_exporter.reconciler.actor import Entry
from gpu_exporter.reconciler.decision.outcomes import (
    ACTS,
    DAYS,
    OUTCOMES,
    REGRET,
    RIGHT,
    TENANTS,
    Account,
    AskFate,
    Watch,
    Watches,
    WatchStart,
)
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.target import Skipped
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.telemetry import Telemetry
from gpu_exporter.reconciler.texts import TextPlace

log = logging.getLogger(__name__)
KEY = "record"  # key of the text in its TextPlace
DAY_S, HOUR_S = 86_400.0, 3600.0
TEXT_MAX = 200 * 1024  # characters; all annotations of an object together may have 256 KiB
PLAIN_MAX = 8 * 1024 * 1024
TENANTS_MAX = 200  # per day, policy and class; the tenants with the fewest decisions are counted as OTHER
OTHER = "other"
FIFTH = 0.2
TENANTS_MIN = 3
BEYOND_CHANCE = 0.001  # a tenant whose regrets are less probable than this does not count for the others
DEVIATIONS = 1.28  # standard deviations above regret_max: one record of ten has more regrets by chance
PRESENT_MIN = 0.9  # share of actions.shadow_for in which a reconciler must have run cycles
LOOK_MAX_S = 120.0  # a longer time between two cycles does not count as running
ACTS_MAX = 256
ACT_KEEP_S = DAY_S  # an owner who resumes a suspended object does so within a day
ACT_LOOK_S = 300.0
LOOKS_MAX = 32  # actions that are checked per cycle
RESUMED_MIN = 5  # with fewer actions, the share of resumed actions does not count
DECIDED, ACTED, RESUMED = "decided", "acted", "resumed"
COUNTS = (DECIDED, *OUTCOMES, ACTED, RESUMED)
VERSION = 1
SAVE_S = 60.0  # interval of writes while only the time in the record changes
TAKEN_OVER_S = 120.0  # a record that another host wrote within this time still belongs to that host


class PolicyStanding(NamedTuple):
    """The record of one policy and class. `decisions`, `regrets`: their numbers; for actions, the number of actions,
    and of those that owners undid.
    """

    decisions: float
    regrets: float


class Record:
    """The record of one site. A process reads it when it begins to decide.

    As OutcomeObserver, it counts the outcomes of its watches.
    """

    def __init__(
        self, place: TextPlace | None, telemetry: Telemetry, clock: Clock, keep_s: float, by: str = ""
    ) -> None:
        """`place`: stores the record; None to keep it only in memory.
        `keep_s`: how long a decision counts (seconds).
        `by`: name of the writer, by default this host, on which only one process writes at a time.
        """
        self._place = place
        self._telemetry = telemetry
        self._clock = clock
        self._keep_s = keep_s
        self._by = by or socket.gethostname()
        self._trouble = ""
        self._said: dict[str, float] = {}  # by word of DROPPED, when it was logged (monotonic)
        self._clear()

    def forget(self) -> None:
        """Forgets the record while another process decides. This process reads it again when it decides itself."""
        if self._place is not None:
            self._clear()
            self._telemetry.forget()

    def _clear(self) -> None:
        self.watches = Watches(self)
        self._days: defaultdict[int, defaultdict[Account, list[int]]] = defaultdict(lambda: defaultdict(_zeros))
        self._totals: defaultdict[tuple[str, str], list[int]] = defaultdict(_zeros)  # by policy and class, for ever
        self._present: defaultdict[int, float] = defaultdict(float)  # seconds, by hour
        self._acts: dict[str, Entry] = {}
        self._looked: dict[str, float] = {}  # by ident of an action: when it was last checked (monotonic)
        self._is_loaded = self._place is None
        self._is_changed, self._saved_at = True, -math.inf  # monotonic

    def names(self) -> set[HolderName]:
        self._load()
        return self.watches.names()

    def note(self, decisions: Sequence[Decision], wall: float, ask_fate: AskFate) -> None:
        self._load()
        if not self._is_loaded:
            return  # an existing record that could not be read must not be overwritten
        before = self.watches.last_wall
        self.watches.note(decisions, wall, ask_fate)
        if before is not None and 0.0 < wall - before <= LOOK_MAX_S:
            self._present[math.floor(wall / HOUR_S)] += wall - before
        self._save()

    def count_decision(self, account: Account) -> None:
        self._count(account, DECIDED)
        self._telemetry.count_decision(account)

    def count_outcome(self, account: Account, outcome: str) -> None:
        self._count(account, outcome)
        self._telemetry.count_outcome(account, outcome)

    def count_dropped(self, what: str, number: int) -> None:
        """See OutcomeObserver.count_dropped. Logs at most once an hour."""
        now = self._clock.monotonic()
        if now - self._said.get(what, -math.inf) >= HOUR_S:
            self._said[what] = now
            log.warning("the record of decisions is full: dropped now: %d %s. See docs/limits.md", number, what)
        self._telemetry.count_dropped(what, number)

    def note_act(self, entry: Entry) -> None:
        """Counts a completed action. For one day, later cycles check whether the target's owner resumes the target.

        Counts each action only once. Raises MarkError while the record cannot be read.
        """
        self._load()
        if not self._is_loaded:
            raise MarkError("error", f"the record of earlier decisions cannot be read: {self._trouble}")
        if entry.ident in self._acts:
            return
        self._count(Account(*entry.record), ACTED)
        while len(self._acts) >= ACTS_MAX:
            self._drop_act()
        self._acts[entry.ident] = entry._replace(ends=(), waited_for=(), undo="")
        self._save()

    def acts_due(self) -> list[Entry]:
        """Returns the actions whose targets must be checked now."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._acts = {ident: entry for ident, entry in self._acts.items() if wall - entry.wall < ACT_KEEP_S}
        self._looked = {ident: at for ident, at in self._looked.items() if ident in self._acts}
        due = [each for ident, each in self._acts.items() if now - self._looked.get(ident, -math.inf) >= ACT_LOOK_S]
        due = due[:LOOKS_MAX]
        self._looked |= {entry.ident: now for entry in due}
        return due

    def note_resumed(self, entry: Entry) -> None:
        self._acts.pop(entry.ident, None)
        self._count(Account(*entry.record), RESUMED)

    def note_gone(self, entry: Entry) -> None:
        """Drops an action whose target no longer exists, because its owner cannot resume it."""
        self._acts.pop(entry.ident, None)

    def why_not(self, account: Account, settings: Actions) -> Skipped | PolicyStanding:
        """Returns the record of a policy, class and tenant, or the reason why it does not allow an action yet."""
        if not self._is_loaded:
            return Skipped("proof", f"the record of earlier decisions cannot be read: {self._trouble}")
        span = format_duration(settings.shadow_for)
        since = self._clock.wall() - settings.shadow_for
        present_s = sum(seconds for hour, seconds in self._present.items() if (hour + 1) * HOUR_S > since)
        if present_s < PRESENT_MIN * settings.shadow_for:
            return Skipped("shadow", f"the reconciler has run for only {present_s / DAY_S:.1f} days of the last {span}")
        first = math.floor(since / DAY_S)
        tenants = self._tenants(account, first, (RIGHT, REGRET), REGRET)
        what = f"of policy {account.policy} on class {account.kind} in {span}"
        own = tenants.get(account.tenant, PolicyStanding(0.0, 0.0))
        if own.regrets > settings.regret_max * own.decisions:
            share = f"{own.regrets:.0f} of {own.decisions:.0f}"
            return Skipped(
                "regret", f"after {share} decisions {what} for tenant {account.tenant}, the holder soon worked again"
            )
        standing = _pool(tenants, settings.regret_max)
        if standing is None:
            return Skipped("shadow", f"decisions {what} come from fewer than {TENANTS_MIN} tenants")
        if standing.decisions < settings.shadow_decisions:
            counted = f"only {standing.decisions:.0f} of the {settings.shadow_decisions} required decisions"
            return Skipped("shadow", f"{counted} {what} are recorded")
        if standing.regrets > settings.regret_max * standing.decisions:
            share = f"{standing.regrets:.1f} of {standing.decisions:.0f}"
            return Skipped("regret", f"after {share} decisions {what}, the holder soon worked again")
        return self._too_many_undone(account, first, settings.resumed_max, what) or standing

    def _too_many_undone(self, account: Account, first: int, resumed_max: float, what: str) -> Skipped | None:
        """Returns the reason if owners undid too many actions: on this tenant, or on all tenants together, counted as
        in `_pool`.
        """
        acts = self._tenants(account, first, (ACTED,), RESUMED)
        own = acts.get(account.tenant, PolicyStanding(0.0, 0.0))
        if own.decisions >= RESUMED_MIN and own.regrets > resumed_max * own.decisions:
            share = f"{own.regrets:.0f} of {own.decisions:.0f}"
            return Skipped("resumed", f"{share} actions {what} for tenant {account.tenant} were undone by their owners")
        acted, undone = (sum(each[at] for each in acts.values()) for at in (0, 1))
        counted = _pool(acts, resumed_max) or PolicyStanding(acted, undone)
        if acted >= RESUMED_MIN and counted.regrets > resumed_max * counted.decisions:
            share = f"{counted.regrets:.1f} of {counted.decisions:.0f}"
            return Skipped("resumed", f"{share} actions {what} were undone by their owners")
        return None

    def _tenants(self, account: Account, first: int, counted: Sequence[str], bad: str) -> dict[str, PolicyStanding]:
        """By tenant, the numbers of decisions or actions (`counted`), and of those with the count `bad`."""
        found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for day, counts in self._days.items():
            for (policy, kind, tenant), numbers in counts.items() if day >= first else ():
                if (policy, kind) == account[:2]:
                    found[tenant][0] += sum(numbers[COUNTS.index(each)] for each in counted)
                    found[tenant][1] += numbers[COUNTS.index(bad)]
        # An action that was undone may have been counted on an earlier day, or for OTHER.
        return {tenant: PolicyStanding(all_of, min(of, all_of)) for tenant, (all_of, of) in found.items() if all_of}

    def _count(self, account: Account, what: str) -> None:
        day = self._days[math.floor(self._clock.wall() / DAY_S)]
        self._is_changed, is_new = True, account not in day
        day[account][COUNTS.index(what)] += 1
        self._totals[account[:2]][COUNTS.index(what)] += 1
        if is_new and len(day) > TENANTS_MAX:
            self._fold(day, TENANTS_MAX)

    def _fold(self, day: defaultdict[Account, list[int]], most: int) -> None:
        """Counts some tenants of a day as OTHER, so that each policy and class names at most `most` tenants.

        Tenants without regrets are folded first, and among them those with the fewest decisions.
        """
        groups: defaultdict[tuple[str, str], list[Account]] = defaultdict(list)
        for account in day:
            if account.tenant != OTHER:
                groups[account[:2]].append(account)
        for group in groups.values():
            group.sort(key=lambda each: (day[each][COUNTS.index(REGRET)] > 0, max(day[each])))
            folded = group[: max(0, len(group) - most)]
            for account in folded:
                other, numbers = day[account._replace(tenant=OTHER)], day.pop(account)
                other[:] = [sum(pair) for pair in zip(other, numbers, strict=True)]
            if folded:
                self.count_dropped(TENANTS, len(folded))

    def _drop_act(self) -> None:
        """Drops the oldest action. The record then cannot show whether its owner resumes the target."""
        del self._acts[next(iter(self._acts))]
        self.count_dropped(ACTS, 1)

    def _load(self) -> None:
        """Reads the record of the previous process. If this fails, the next cycle tries again."""
        if self._is_loaded or self._place is None:
            return
        try:
            text = self._place.read_text(KEY)
            if text:
                self._restore(text)
            self._is_loaded, trouble = True, ""
        except MarkError as exc:
            trouble = str(exc)
        if trouble and trouble != self._trouble:
            log.warning("the record of earlier decisions cannot be read, so no decision is counted: %s", trouble)
        self._trouble = trouble

    def _save(self) -> None:
        now = self._clock.monotonic()
        if self._place is None or not self._is_loaded or not (self._is_changed or now - self._saved_at >= SAVE_S):
            return
        since = self._clock.wall() - self._keep_s
        self._drop(self._days, since, DAY_S)
        self._drop(self._present, since, HOUR_S)
        text = self._render_within(TEXT_MAX)
        try:
            self._place.write_text(KEY, text)
        except MarkError as exc:
            if exc.result == "conflict":  # another process decides
                self.forget()
            if str(exc) != self._trouble:
                log.warning("the record of decisions could not be saved: %s", exc)
            self._trouble = str(exc)
        else:
            self._is_changed, self._saved_at, self._trouble = False, now, ""

    def _render_within(self, longest: int) -> str:
        """Returns the record as a text of at most `longest` characters.

        Drops parts in the order of DROPPED. Watches are dropped first, because there are many. Days are dropped last,
        because without them no action is allowed for two weeks.
        """
        text = self._render()
        while len(text) > longest and self.watches.open:
            self.watches.give_up(max(1, self.watches.watched // 4))
            text = self._render()
        most = TENANTS_MAX
        while len(text) > longest and most:
            most //= 2
            for day in self._days.values():
                self._fold(day, most)
            text = self._render()
        while len(text) > longest and self._acts:
            self._drop_act()
            text = self._render()
        while len(text) > longest and len(self._days) > 1:
            del self._days[min(self._days)]
            self.count_dropped(DAYS, 1)
            text = self._render()
        return text

    def _render(self) -> str:
        plain = {
            "v": VERSION,
            "by": self._by,
            "last": self.watches.last_wall,
            "present": {str(hour): round(seconds, 1) for hour, seconds in self._present.items()},
            "totals": [[*key, *numbers] for key, numbers in self._totals.items()],
            "days": {
                str(day): [[*account, *numbers] for account, numbers in counts.items()]
                for day, counts in self._days.items()
            },
            "open": [
                [
                    *key,
                    list(watch.account),
                    watch.wall,
                    [[*name, *start, watch.quiet.get(name, watch.wall)] for name, start in watch.holders.items()],
                    [list(name) for name in watch.ended],
                ]
                for key, watch in self.watches.open.items()
            ],
            "acts": render(self._acts.values()),
        }
        packed = zlib.compress(json.dumps(plain, separators=(",", ":")).encode())
        return base64.b64encode(packed).decode()

    def _restore(self, text: str) -> None:
        """Fills the record from its text. Raises MarkError for a text in another format."""
        try:
            unpack = zlib.decompressobj()
            data = unpack.decompress(base64.b64decode(text, validate=True), PLAIN_MAX)
            if unpack.unconsumed_tail:
                raise ValueError("too long")
            plain = json.loads(data)
            if plain["v"] != VERSION:
                raise ValueError(f"version {plain['v']!r}")
            self._fill(plain)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error) as exc:
            self._clear()
            raise MarkError(
                "error",
                f"cannot parse it ({exc}); remove the record (key {KEY}) to start a new one",
            ) from exc

    def _fill(self, plain: Any) -> None:
        last = None if plain["last"] is None else need_real(plain["last"])
        if last is not None and plain["by"] != self._by and 0.0 <= self._clock.wall() - last < TAKEN_OVER_S:
            wait = f"this reconciler counts nothing until the record is {TAKEN_OVER_S / 60:.0f} minutes old"
            raise MarkError("fenced", f"{plain['by']} wrote the record a moment ago, and may still run: {wait}")
        self.watches.last_wall = last
        for hour, seconds in plain["present"].items():
            self._present[math.floor(need_real(hour))] = need_real(seconds)
        for policy, kind, *numbers in plain["totals"]:
            self._totals[str(policy), str(kind)] = _counts(numbers)
        for day, rows in plain["days"].items():
            for policy, kind, tenant, *numbers in rows:
                self._days[math.floor(need_real(day))][Account(str(policy), str(kind), str(tenant))] = _counts(numbers)
        for scheduler, namespace, group, account, wall, holders, ended in plain["open"]:
            watch = Watch(
                Account(*map(str, account)),
                need_real(wall),
                {
                    HolderName(*map(str, n)): WatchStart(str(of), need_real(run), need_real(gap))
                    for *n, of, run, gap, _ in holders
                },
                {HolderName(*map(str, name)) for name in ended},
                {HolderName(*map(str, n)): need_real(quiet) for *n, _, _, _, quiet in holders},
            )
            self.watches.open[str(scheduler), str(namespace), str(group)] = watch
        self._acts = {entry.ident: entry for entry in parse(plain["acts"], PLAIN_MAX)}
        for (policy, kind), numbers in self._totals.items():
            of = dict(zip(COUNTS, numbers, strict=True))
            self._telemetry.restore(policy, kind, of[DECIDED], {outcome: of[outcome] for outcome in OUTCOMES})

    @staticmethod
    def _drop(by_time: dict[int, Any], since: float, each_s: float) -> None:
        for key in [key for key in by_time if (key + 1) * each_s <= since]:
            del by_time[key]


def _zeros() -> list[int]:
    return [0] * len(COUNTS)


def _counts(numbers: Iterable[Any]) -> list[int]:
    """Returns the counts in the order of COUNTS. Raises ValueError if their number is wrong."""
    counts = list(need_wholes(numbers))
    if len(counts) != len(COUNTS):
        raise ValueError("wrong number of counts")
    return counts


def _pool(tenants: Mapping[str, PolicyStanding], regret_max: float) -> PolicyStanding | None:
    """Returns the record of all tenants together; None for fewer than TENANTS_MIN tenants.

    `regret_max`: the limit on regrets; for undone actions, `resumed_max`.

    Leaves out tenants with more regrets than chance explains, but never more than a third of the tenants. Of each other
    tenant, at most as many regrets count as chance can explain. No tenant counts for more than a fifth of all
    decisions. The fifth of the tenants with the most decisions is capped at the decisions of the largest tenant outside
    this fifth. Figures: docs/decisions/0045.
    """
    worst = sorted(tenants, key=lambda tenant: chance(*tenants[tenant], regret_max))[: len(tenants) // 3]
    beyond = {tenant for tenant in worst if chance(*tenants[tenant], regret_max) < BEYOND_CHANCE}
    counted = [each for tenant, each in tenants.items() if tenant not in beyond]
    if len(counted) < TENANTS_MIN:
        return None
    sizes = sorted((each.decisions for each in counted), reverse=True)
    most = min(FIFTH * sum(sizes), sizes[len(sizes) // 5])
    decisions = regrets = 0.0
    for each in counted:
        spread = math.sqrt(regret_max * (1.0 - regret_max) * each.decisions)
        weight = min(1.0, most / each.decisions)
        decisions += weight * each.decisions
        regrets += weight * min(each.regrets, regret_max * each.decisions + DEVIATIONS * spread)
    return PolicyStanding(decisions, regrets)


def chance(decisions: float, regrets: float, regret_max: float) -> float:
    """Returns the probability of at least this many regrets, if each decision is a regret with probability
    `regret_max`.

    The upper tail of the binomial distribution; 1.0 for regrets within `regret_max`.
    """
    if regrets <= regret_max * decisions:
        return 1.0
    odds = regret_max / (1.0 - regret_max)
    ways = math.lgamma(decisions + 1) - math.lgamma(regrets + 1) - math.lgamma(decisions - regrets + 1)
    term = total = math.exp(ways + regrets * math.log(odds) + decisions * math.log1p(-regret_max))
    while term > 1e-9 * total:
        term *= odds * (decisions - regrets) / (regrets + 1)
        regrets += 1
        total += term
    return total
