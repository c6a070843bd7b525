"""Detects that a holder's GPU spins: it is fully busy at low, flat power, and no witness shows progress. Pure.

A run of such seconds becomes a stall after `stalls.after`. Any witness of progress ends the run. A witness that was
never known lowers the confidence by one step. A run ends if a known witness is missing for `gap_max`, because progress
may have been missed. docs/stalls.md explains the rule, and lists other loads that look the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.readings import Effort, HostProgress, Span
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.stalls.confidence import PUBLISHED, is_collective, judge_confidence
from gpu_exporter.diagnosis.stalls.floor import BoardFloor
from gpu_exporter.diagnosis.stalls.power import PowerStep, PowerSteps, Spread
from gpu_exporter.diagnosis.stalls.rules import MINUTE_S, NO_NVLINK, STEP_S, StallRules, resting_power
from gpu_exporter.diagnosis.stalls.run import (
    DISK,
    LOADERS,
    MEMORY,
    NETWORK,
    NVLINK,
    OF_HOST,
    PCIE,
    POWER,
    PROCESSES,
    PROGRESS,
    SM,
    SpinMemory,
    SpinRun,
)
from gpu_exporter.diagnosis.stalls.waits import NOTHING_KNOWN, Around
from gpu_exporter.diagnosis.stalls.work import WorkHistory

# Each witness must be known this long after the begin of a run. The host needs two readings, one every 30 s.
GRACE_S = 150.0
BOARDS_DIFFER = 1.1  # a board at rest may draw this many times the published value of its model
ROUNDING = 1e-6  # tolerance for the mean of many readings that are all just high enough
HALF, NEARLY_ALL = 0.5, 0.9  # of the default limit, of a small board: a GPU that only waits draws less
STEPS_MIN = 0.8  # known share of the time over which the power must be flat
UNKNOWN_FLOOR = "the power of this board at rest is unknown: the exporter has never seen it at utilization 0"


class SpinWatch:
    """Watches one holder. Readings must be in the order of time."""

    def __init__(self, rules: StallRules, product: str, floor: BoardFloor, work: WorkHistory) -> None:
        """`product`: NVML's name of the board. `floor`: the board's power at rest, kept when its holder changes."""
        self._rules = rules
        self._has_nvlink = NO_NVLINK.search(product) is None
        self._table_w = resting_power(product)
        self._floor = floor
        self.work = work
        self._steps = PowerSteps()
        self._run: SpinRun | None = None
        self._last: dict[str, float] = {}  # by witness, when it was last known
        self._not_before = float("-inf")
        self._default_w: float | None = None
        self._highest_w = float("inf")  # the highest power of a spin, as of the last reading
        self.unknown = "no reading yet"
        """why a stall cannot be detected here, "" if a run may begin"""
        self._sm: float | None = None  # as last read; a GPM window may be missing now and then
        self._polls = False  # whether the SMs with work read flags in the host's memory
        self._is_below = False
        self._resumed_at = float("-inf")
        self._has_stepped = False
        self._silent_since: float | None = None  # since when the training loop makes no step
        self._steps_read = float("-inf")  # when its report was last read
        self.ended_by = ""
        """the reason why the last run ended, or why no run begins"""
        self._quiet_since: float | None = None  # since when no reading shows progress, while no stall can be seen
        self._read_at = 0.0
        self._levels = Spread(rules.flat_over)
        self._memory: float | None = None
        self._progresses = False  # whether the last reading shows arithmetic, traffic, or power that a wait never draws
        self.around: Around = NOTHING_KNOWN
        self.works_s = 0.0
        """seconds of the last reading in which the GPU computed, moved data, or drew as much power as in work"""
        self.is_armed = False
        """whether this process has seen the GPU work or rest; before that, no run begins"""

    @property
    def begin(self) -> float | None:
        """The start of the present run (monotonic seconds). None without a run."""
        return self._run.begin if self._run is not None else None

    @property
    def polls(self) -> bool:
        """Whether the GPU's kernel reads flags in the host's memory, as a collective over a network does."""
        return self._polls

    @property
    def known_s(self) -> float:
        """Known seconds of the present run, 0 without a run."""
        return self._run.known_s if self._run is not None else 0.0

    @property
    def quiet_s(self) -> float:
        """Seconds since the last sign of progress if a stall cannot be detected; 0 if it can."""
        return 0.0 if self._quiet_since is None else self._read_at - self._quiet_since

    @property
    def is_stall(self) -> bool:
        """Whether the run is long and certain enough to be published as a stall."""
        run = self._run
        if run is None or run.known_s < self._needed_s(run) or run.unread:
            return False
        judged_s = min(self._rules.flat_over, run.until - max(run.begin, self._resumed_at) - STEP_S)
        if run.steps.covered_s < STEPS_MIN * judged_s:
            return False  # too little of the power is known to call it flat
        return self._judge(run)[0] in PUBLISHED

    def _needed_s(self, run: SpinRun) -> float:
        """Known seconds after which the run may be called a stall."""
        if not self.around.proof:
            return self.around.expected_s or self._rules.after
        is_certain = self._has_worked() and not self._unknown_witnesses(run)
        return min(self._rules.proven_after, self._rules.after) if is_certain else self._rules.after

    @property
    def may_be_stall(self) -> bool:
        """Whether the run is a stall or may still become one."""
        run = self._run
        return run is not None and (run.known_s < self._rules.after or self.is_stall)

    def remember(self) -> SpinMemory | None:
        """Returns the data with which a restarted exporter continues the run. None without a run."""
        run = self._run
        if run is None:
            return None
        all_known = not self._unknown_witnesses(run)
        return SpinMemory(run.begin, run.until, run.known_s, all_known, self.is_stall, run.memory_bytes, self._sm)

    def resume(self, memory: SpinMemory, at: float) -> bool:
        """Continues a run that was saved before a restart. Returns False if more than `gap_max` has passed."""
        if at - memory.until > self._rules.gap_max:
            return False
        self._run = self._new_run(memory.begin)
        run = self._run
        self._resumed_at = at
        run.known_s, run.until, run.memory_bytes = memory.known_s, memory.until, memory.memory_bytes
        if memory.all_known:
            run.since = dict.fromkeys(self._required(), memory.begin)
            self._last = dict.fromkeys((*self._required(), POWER), memory.until)  # each must be read again in time
            run.unread = set() if memory.was_stall else set(self._last)
        if memory.sm is not None:
            self._sm, self._last[SM], run.since[SM] = memory.sm, memory.until, memory.begin
            self._polls = memory.was_stall  # only then is it known; PCIe is read again with the first power
        return True

    def read(self, effort: Effort, spans: Sequence[Span], contradiction: str) -> None:
        """Takes one reading of the GPU. `spans`: the known utilization since the last reading.

        `contradiction`: why this reading cannot show a stall, "" if it can.
        """
        self._read(effort, spans, contradiction)
        self._read_at = effort.end
        if not self.unknown or self._is_below or self._progresses:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = effort.end

    def _read(self, effort: Effort, spans: Sequence[Span], contradiction: str) -> None:
        step = self._steps.add(effort, spans)
        if effort.default_limit_w is not None:
            self._default_w = effort.default_limit_w
        self.unknown = self._why_unknown(contradiction)
        self.works_s = 0.0
        if step is not None:
            self._learn(step)
            self._note([POWER], step.start, step.end)
        if spans:
            self._is_below = spans[-1].ratio < self._rules.utilization_min
        seen, power_w = self._find_work(effort), _lowest_power(effort)
        if self.unknown:
            self._progresses = bool(seen) or self._draws(power_w) or self._is_unsteady(effort, power_w)
            self._end(effort.end, self.unknown)
            return
        if seen or power_w > self._share(self._rules.low_ratio):
            self.works_s = sum(span.end - span.start for span in spans if span.ratio > 0.0)
        self._progresses = self.works_s > 0.0
        self._highest_w = self._highest_power()
        if not seen and power_w > self._highest_w:
            seen = f"{power_w:.0f} W is above {self._highest_w:.0f} W"
        if seen := seen or self._find_change(effort):
            self.is_armed = True
            self._end(effort.end, seen)
        for span in spans:
            self._take(span)
        if self._run is None:
            return
        silent_s = effort.end - max(self._run.until, self._run.begin)
        if silent_s > self._rules.gap_max:
            self._end(effort.end, f"the utilization was unknown for {silent_s:.0f} s")
            return
        if step is not None and (seen := self._judge_power(self._run, step)):
            self.is_armed = True
            self._end(effort.end, seen)
            return
        missing = self._find_missing(self._run, effort.end)
        if missing:
            self._end(effort.end, missing)

    def _draws(self, power_w: float) -> bool:
        """Returns whether the power is too high for a GPU that only waits. False without a known power limit."""
        limit_w = self._default_w or 0.0
        share = HALF if limit_w > self._rules.small_board_watts else NEARLY_ALL
        return limit_w > 0.0 and power_w > share * limit_w

    def _is_unsteady(self, effort: Effort, power_w: float) -> bool:
        """Returns whether the power or the memory in use changes. Neither changes while a GPU only waits."""
        before, self._memory = self._memory, effort.memory_bytes
        if power_w:
            self._levels.add(effort.end, power_w)
        widest_w = max(self._rules.flat_watts, self._rules.flat_ratio * (self._default_w or 0.0))
        is_moved = None not in (before, self._memory) and before != self._memory
        return is_moved or self._levels.width() > widest_w

    def hear(self, host: HostProgress) -> None:
        """Takes the holder's activity on its host."""
        rules, seen = self._rules, ""
        self._note_steps(host)
        known = {
            LOADERS: host.loaders_cores,
            PROCESSES: host.new_process,
            DISK: host.disk,
            NETWORK: host.network,
        }
        self._note((name for name, value in known.items() if value is not None), host.start, host.end)
        if host.steps:
            seen = f"its training loop made {host.steps} steps"
        elif (host.loaders_cores or 0.0) >= rules.loaders_max:
            seen = f"its other processes use {host.loaders_cores:.2f} cores"
        elif host.loaders_cores is None and (host.cores or 0.0) > self._spinning_cores(host.spinning):
            seen = f"its processes use {host.cores:.1f} cores, more than {host.spinning} waiting GPUs need"
        elif host.new_process:
            seen = "a process started"
        else:
            for name in (DISK, NETWORK):
                rate = known[name]
                if rate is not None and rate >= rules.host_bytes_max:
                    seen = f"{rate / 1e6:.1f} MB/s over its {name}"
        if seen:
            self._quiet_since = None
            self._end(host.end, seen)

    def _spinning_cores(self, gpus: int) -> float:
        """Returns the number of CPUs that a holder may use without progress while `gpus` of its GPUs wait."""
        return self._rules.cores_each * gpus + self._rules.cores_beside

    def _note_steps(self, host: HostProgress) -> None:
        """Notes since when the training loop has made no step. A whole run without a step is evidence of a stall."""
        if host.steps:
            self._has_stepped, self._silent_since = True, None
        elif host.steps == 0 and self._has_stepped and self._silent_since is None:
            self._silent_since = host.start
        if host.steps is not None:
            self._steps_read = host.end

    def _has_stopped(self, run: SpinRun) -> bool:
        """Returns whether the training loop made steps until this run began, and has provably made none since."""
        since = self._silent_since
        is_read = run.until - self._steps_read <= GRACE_S
        return since is not None and abs(since - run.begin) <= GRACE_S and is_read

    def report(self) -> Spin:
        """Returns the present run in its published form."""
        run = self._run
        if run is None:
            is_blind = self.quiet_s >= self._rules.after
            return Spin(0.0, "none", "", self.ended_by, self.unknown, is_below=self._is_below, is_blind=is_blind)
        unknown = self._unknown_witnesses(run)
        confidence, doubts = self._judge(run)
        power_w = run.steps.mean()
        floor_w, limit_w = self._floor_w(), self._default_w
        facts = ["100 % busy"]
        if power_w is not None and floor_w is not None and limit_w is not None:
            learned = " as seen here" if self._table_w is None else ""
            facts.append(f"at {power_w:.0f} W, flat within {run.steps.width():.0f} W (at rest {floor_w:.0f} W{learned}")
            median_w = self.work.median_w()
            facts[-1] += f", at work {median_w:.0f} W)" if self._has_worked() and median_w else ")"
        if (sm := run.sms.mean()) is not None:
            facts.append(f"{sm:.0%} of the SMs and no arithmetic")
        if self.around.proof:
            facts.append(self.around.proof)
        elif self.around.expected_s is not None:
            facts.append(
                f"its earlier waits ended without help within {describe_duration(self.around.waited.longest_s)}"
            )
        if self._has_stopped(run):
            facts.append("its training loop makes no more steps")
        quiet = [name for name in self._required() if name not in unknown]
        if quiet:
            facts.append(f"no progress by {', '.join(quiet)}")
        return Spin(
            run.known_s,
            self._published_confidence(confidence),
            evidence="; ".join(facts),
            against="; ".join(doubts),
            all_known=not unknown,
            proof=self.around.proof,
        )

    def _judge(self, run: SpinRun) -> tuple[str, list[str]]:
        unknown = self._unknown_witnesses(run)
        return judge_confidence(
            self._rules,
            self._sm,
            unknown,
            has_worked=self._has_worked(),
            has_stopped=self._has_stopped(run),
            polls=self._polls,
            around=self.around,
        )

    def _published_confidence(self, confidence: str) -> str:
        """Returns the confidence to publish: "none" while the run is too short, "low" while it is uncertain."""
        if self._run is None or self.known_s < self._needed_s(self._run):
            return "none"
        return confidence if self.is_stall else "low"

    def end(self, at: float, why: str) -> None:
        """Ends the run, because the GPU can no longer be watched."""
        self.unknown = why
        self._is_below = False
        self._end(at, why)

    def _new_run(self, begin: float) -> SpinRun:
        return SpinRun(begin, Spread(self._rules.flat_over), Spread(self._rules.flat_over), until=begin)

    def _end(self, at: float, why: str) -> None:
        self._run = None
        self._not_before = max(self._not_before, at)
        self.ended_by = why

    def _why_unknown(self, contradiction: str) -> str:
        if contradiction:
            return contradiction
        if self._default_w is None:
            why = "the board reports no default power limit, so its power does not show whether it works or waits"
            return why if self._floor.seen_w is None else f"{why}; at utilization 0 it drew {self._floor.seen_w:.0f} W"
        if self._default_w <= self._rules.small_board_watts:
            return f"the board's limit is {self._default_w:.0f} W, so its power does not show whether it works or waits"
        return UNKNOWN_FLOOR if self._floor_w() is None else ""

    def _floor_w(self) -> float | None:
        """Returns the power at rest in watts: the lowest seen, at most BOARDS_DIFFER times the published value.

        A process with a context on the GPU may double the power at rest.
        """
        if self._table_w is None or self._floor.seen_w is None:
            return self._table_w if self._floor.seen_w is None else self._floor.seen_w
        return min(self._floor.seen_w, BOARDS_DIFFER * self._table_w)

    def _share(self, ratio: float) -> float:
        """Returns the watts at this share of the range from the power at rest to the default limit. Both are known."""
        floor_w, limit_w = self._floor_w(), self._default_w
        assert floor_w is not None and limit_w is not None
        return floor_w + ratio * (limit_w - floor_w)

    def _learn(self, step: PowerStep) -> None:
        if step.ratios == (0.0, 0.0):
            self._floor.learn(step.power_w)
            return
        if step.ratios is None or self._floor_w() is None or self._default_w is None:
            return
        if step.power_w > self._share(self._rules.work_ratio):
            self.work.add(step.power_w, step.end - step.start, self._default_w)

    def _has_worked(self) -> bool:
        return self.work.total_s >= self._rules.work_min

    def _highest_power(self) -> float:
        """Returns the highest power at which the GPU may still spin, in watts.

        It is lower if the SM activity does not fit a collective, because a small kernel that never ends looks the same.
        """
        if self._sm is not None and is_collective(self._sm, self._rules, polls=self._polls):
            return self._share(self._rules.low_ratio)
        alone_w = self._share(self._rules.low_alone_ratio)
        median_w = self.work.median_w()
        return min(alone_w, self._rules.low_of_work * median_w) if self._has_worked() and median_w else alone_w

    def _find_work(self, effort: Effort) -> str:
        """Returns the evidence of work in this reading, "" without evidence."""
        rules = self._rules
        known = {MEMORY: effort.memory_bytes, PCIE: effort.pcie, NVLINK: effort.nvlink}
        self._note((name for name, value in known.items() if value is not None), effort.start, effort.end)
        if effort.sm is not None and effort.pipes is not None and effort.dram is not None:
            self._note([SM], effort.start, effort.end)
            self._sm = effort.sm
        elif effort.end - self._last.get(SM, -math.inf) > rules.gap_max:
            self._sm = None
        if (effort.pipes or 0.0) >= rules.pipe_max:
            return f"its arithmetic units are {effort.pipes:.2%} active"
        if (effort.dram or 0.0) >= max(rules.pipe_max, rules.dram_ratio * (self._sm or 0.0)):
            return f"its memory is {effort.dram:.2%} active"
        # The kernel of a collective reads flags that the host writes, so its own traffic grows with its SMs. Traffic
        # beyond that is treated as if all of it had moved within one second of the reading.
        if self._sm is not None and effort.pcie is not None:
            self._polls = effort.pcie >= rules.polling_min * self._sm
        spins = self._sm is not None and is_collective(self._sm, rules, polls=self._polls)
        polling = rules.polling_max * (self._sm or 0.0) if spins else 0.0
        for name, polled in ((PCIE, polling), (NVLINK, 0.0)):
            rate = known[name]
            if rate is not None and (rate - polled) * max(1.0, effort.end - effort.start) >= rules.traffic_max:
                return f"{rate / 1e6:.0f} MB/s over {name}"
        return ""

    def _find_change(self, effort: Effort) -> str:
        """Describes a change in this reading since the run began, "" without a change."""
        rules, run = self._rules, self._run
        if run is None:
            return ""
        if effort.memory_bytes is not None:
            if run.memory_bytes not in (None, effort.memory_bytes):
                return "its memory on the GPU changed"
            run.memory_bytes = effort.memory_bytes
        if effort.limit_w is not None:
            if run.limit_w is not None and abs(run.limit_w - effort.limit_w) > 1.0:
                return "the power limit was changed"
            run.limit_w = effort.limit_w
        if effort.sm is not None:
            run.sms.add(effort.end, effort.sm)
            if run.sms.width() > rules.sm_flat:
                return f"the SM activity changes by {run.sms.width():.1%}"
        return ""

    def _take(self, span: Span) -> None:
        """Takes the utilization of one span. The span begins, continues or ends a run."""
        rules, run = self._rules, self._run
        if span.end <= span.start or span.end <= self._not_before:
            return
        if span.ratio < rules.utilization_min:
            self.is_armed = True
            self._end(span.end, f"utilization {span.ratio:.0%}")
            return
        if run is None:
            if POWER not in self._last:
                self.unknown = "the energy counter of the board cannot be read"
                return
            if not self.is_armed:
                self.unknown = "since its start, the exporter has only seen this GPU fully busy at low power"
                return
            run = self._run = self._new_run(max(span.start, self._not_before))
        gap_s = span.start - max(run.until, run.begin)
        if gap_s > rules.gap_max:
            self._end(span.start, f"the utilization was unknown for {gap_s:.0f} s")
            return
        length_s = span.end - max(span.start, run.until)
        if length_s <= 0.0:
            return
        run.until = span.end
        run.known_s += length_s
        run.minute_s += length_s
        run.minute_busy_s += length_s * span.ratio
        if run.minute_s >= MINUTE_S:
            mean = run.minute_busy_s / run.minute_s
            run.minute_s = run.minute_busy_s = 0.0
            if mean < rules.utilization_mean - ROUNDING:
                self._end(span.end, f"mean utilization {mean:.1%} over a minute")

    def _judge_power(self, run: SpinRun, step: PowerStep) -> str:
        """Returns why the power of this step proves that the GPU does not spin, "" if there is no such proof."""
        if step.start < run.begin:
            return ""  # a part of the step is before the run
        assert self._default_w is not None
        if step.power_w > self._highest_w:
            return f"{step.power_w:.0f} W is above {self._highest_w:.0f} W"
        run.steps.add(step.end, step.power_w, step.end - step.start)
        widest_w = max(self._rules.flat_watts, self._rules.flat_ratio * self._default_w)
        if run.steps.width() > widest_w:
            return f"the power changes by {run.steps.width():.0f} W"
        return ""

    def _note(self, names: Iterable[str], start: float, end: float) -> None:
        """Notes that these witnesses are known over (start, end]."""
        for name in names:
            if self._run is not None:
                self._run.since.setdefault(name, start)
                self._run.unread.discard(name)
            self._last[name] = end

    def _find_missing(self, run: SpinRun, at: float) -> str:
        """Describes a witness that was known before and is missing now, "" if none is missing.

        The host is read only during a run, every 30 s, so its witnesses may be older.
        """
        for name, last in self._last.items():
            silent_s = at - max(last, run.begin) if name in OF_HOST else at - last
            if silent_s > (GRACE_S if name in OF_HOST else self._rules.gap_max):
                return f"{name} was known before, but has not been read for {silent_s:.0f} s"
        return ""

    def _required(self) -> tuple[str, ...]:
        return PROGRESS if self._has_nvlink else tuple(name for name in PROGRESS if name != NVLINK)

    def _unknown_witnesses(self, run: SpinRun) -> tuple[str, ...]:
        """Returns the witnesses of progress that became known over GRACE_S after the start of the run, or never."""
        latest = run.begin + GRACE_S
        return tuple(name for name in self._required() if run.since.get(name, math.inf) > latest)


def _lowest_power(effort: Effort) -> float:
    """Returns the lower of a reading's two power values, in watts; 0 if both are unknown.

    Some energy counters are updated once a second, so the power of one short reading may be twice the real one, or 0.
    """
    return min((value for value in (effort.power_w, effort.reading_w) if value is not None), default=0.0)
