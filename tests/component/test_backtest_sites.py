"""`gpu-exporter backtest` about the odd sites of the report: a holder that works is never underused there either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.config.defaults import Alerts, Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reports.backtest.gather import read_gangs
from gpu_exporter.reports.backtest.lives import PastGang
from gpu_exporter.reports.backtest.sums import Sums
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.run import Progress
from gpu_exporter.reports.usage.site import find_site
from tests.component.test_report_sites import CASES
from tests.component.test_report_witnesses import CASES as WITNESSES
from tests.testbed.history import HOUR
from tests.testbed.history_worlds import END
from tests.testbed.report_sites import Case, Hours, Truth, serve
from tests.testbed.site_series import ZERO, Site, between, pulses, steady

pytestmark = pytest.mark.servers
HASTY = Rulebook(Policy(candidate_after=1800.0, underused_after=1800.0, startup_grace=0.0, coverage_min=0.0))


def work_that_the_engine_does_not_show(site: Site) -> Truth:
    """The utilization shows work, the engine activity is noise: the GPU was not idle. Also once in 25 minutes."""
    site.gpu("n1", 1, "hidden", steady(0.3), engine=0.0005)
    site.gpu("n1", 2, "rare", lambda since, until: float(since % 1500.0 < 90.0), engine=0.0005)
    site.gpu("n1", 3, "idle", between(0.0, site.start + HOUR))
    return Truth({}, {"ml/hidden": {"idle": (0.0, 0.0)}, "ml/idle": {"idle": (4.9, 5.1)}})


def work_between_the_samples(site: Site) -> Truth:
    """Every two minutes, 30 s of work that neither a sample nor the mean of the 30 s before it shows."""
    for number in (8, 16):
        site.gpu(f"n{number}", number, f"hidden-{number}", pulses(120, 30, 30 - 7 * number % 30), step=120)
    return Truth({"idle": (0.0, 0.0)})


def an_engine_that_is_stuck(site: Site) -> Truth:
    """It stayed at 0 while the GPU worked, so its zeros prove nothing."""
    site.gpu("n1", 1, "stuck", between(0.0, site.start + HOUR), engine=0.0)
    return Truth({"idle": (0.0, 0.0)})


def an_engine_that_is_missing_at_times(site: Site) -> Truth:
    """The utilization alone is at zero for two minutes of each 24."""
    site.gpu("n1", 1, "missing", ZERO, engine=lambda at: None if 0.0 < at % 1440.0 <= 120.0 else 0.0)
    return Truth({"idle": (0.0, 0.0)})


MORE = (
    work_that_the_engine_does_not_show,
    work_between_the_samples,
    an_engine_that_is_stuck,
    an_engine_that_is_missing_at_times,
)
SITES = {**CASES, **WITNESSES, **{build.__name__: Case(build, 6, 30, ()) for build in MORE}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Mapping[str, Truth]]]:
    with serve(tmp_path_factory.mktemp("sites"), SITES) as found:
        yield found


def read(url: str, name: str, hours: float) -> list[PastGang]:
    progress, matcher = Progress("backtest"), f'cluster=~"{name}(-.+)?"'
    history = History(parse_address(url), fetch_text, progress=progress)
    span = WindowSpan(END - hours * HOUR, END, HOUR)
    site = find_site(history, matcher, span)
    try:
        return read_gangs(history, matcher, Alerts().team_label, Policy(), site, span, progress)[0]
    except AnswerError:  # a site whose exporter names no holders
        return []


@pytest.mark.parametrize("name", SITES)
def test_a_holder_that_works_is_never_underused(server: tuple[str, Mapping[str, Truth]], name: str) -> None:
    """Even by a policy without grace, with windows of half an hour, and without a required coverage."""
    url, truths = server
    gangs = read(url, name, SITES[name].hours)
    found = Sums(gangs, 0.0, lambda _model, _cluster: None).tally(HASTY, 1)
    decided = {str(life.name) for each in found.decided for life in each.lives}
    if is_never_idle(truths[name].hours):
        assert not decided
    for holder, parts in truths[name].holders.items():
        if is_never_idle(parts):
            assert holder not in decided, (holder, parts)
    if name == "work_that_the_engine_does_not_show":
        assert decided == {"ml/idle"}


def is_never_idle(parts: Mapping[str, Hours]) -> bool:
    """Whether the report may find less than half an hour of idle time."""
    idle = parts.get("idle")
    most = idle[1] if isinstance(idle, tuple) else idle
    return most is not None and most < 0.5
