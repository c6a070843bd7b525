"""Which of the site's policies decides on a holder, and the effect of each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import POLICY, WALL, A, B, Bench, Book, holder

from gpu_exporter.common.config.rules import Match, PolicyRule
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, decide
from gpu_exporter.reconciler.decision.rulebook import Chosen, NotKnown, Rulebook, matches
from gpu_exporter.reconciler.decision.settle import settle
from gpu_exporter.reconciler.decision.surroundings import Exemption, Member, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import FACTS, Evidence, HolderEvidence, HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.notice import event_note
from gpu_exporter.reconciler.plan import Limits
from gpu_exporter.reconciler.report import explain

M = 60.0
POD = Surroundings(kind="batch", labels={"team": "vision", "app": "train"}, owner_kinds=("Job", "batch/Job"))


def job(**facts: str) -> HolderEvidence:
    return holder(B, [9000.0])._replace(facts={fact: frozenset([facts.get(fact, "")]) for fact in FACTS})


def live(**facts: tuple[str, ...]) -> Surroundings:
    return Surroundings(kind="batch", job_facts=facts)


def pod(*models: str, mig: Sequence[str] = ()) -> HolderEvidence:
    found = holder(A, [9000.0] * max(1, len(models), len(mig)))
    units = tuple(
        unit._replace(model=models[i] if models else "", mig=mig[i] if mig else "")
        for i, unit in enumerate(found.units)
    )
    return found._replace(units=units)


@pytest.mark.parametrize(
    ("match", "seen", "around", "wanted"),
    [
        (Match(), pod(), None, True),
        (Match(namespaces=("m?",)), pod(), None, True),
        (Match(namespaces=("lab", "m")), pod(), None, False),
        (Match(namespaces=("*",)), job(), None, False),
        (Match(labels=(("team", "vis*"),)), pod(), POD, True),
        (Match(labels=(("team", "vis*"), ("app", "serve"))), pod(), POD, False),
        (Match(labels=(("owner", "*"),)), pod(), POD, False),
        (Match(labels=(("team", "vis*"),)), pod(), None, "its live object is not read here"),
        (Match(labels=(("team", "vis*"),)), job(), None, False),
        (Match(owner_kinds=("batch/Job",)), pod(), POD, True),
        (Match(owner_kinds=("PyTorchJob", "Job")), pod(), POD, True),
        (Match(owner_kinds=("apps/Job",)), pod(), POD, False),
        (Match(owner_kinds=("job",)), pod(), POD, False),
        (Match(classes=("batch",)), pod(), POD, True),
        (Match(classes=("serving",)), job(), POD, False),
        (Match(classes=("batch",)), job(), None, "its live object is not read here"),
        (Match(models=("*a100*",)), pod("NVIDIA A100-SXM4-40GB"), None, True),
        (Match(models=("*A100*",)), pod("NVIDIA H100", "NVIDIA A100"), None, True),
        (Match(models=("*A100*",)), pod("NVIDIA H100"), None, False),
        (Match(models=("*A100*",)), pod("NVIDIA H100", ""), None, "the series do not name the model of each GPU"),
        (Match(mig=True), pod(mig=["", "1g.5gb"]), None, True),
        (Match(mig=True), pod(), None, False),
        (Match(mig=False), pod(mig=["1g.5gb"]), None, False),
        (Match(partitions=("debug",), users=("a*",)), job(partition="debug", user="ada"), None, True),
        (Match(accounts=("phys",)), job(account="chem"), None, False),
        (Match(qos=("low",)), job(qos="low"), None, True),
        (Match(qos=("low",)), pod(), None, False),
        (Match(accounts=("phys",)), job(), None, "the series do not name the account"),
        (Match(accounts=("phys",)), holder(B, [1.0]), None, "the series do not name the account"),
        (Match(job_names=("jupyter*",)), job(), live(job_names=("jupyter-lab",)), True),
        (Match(job_names=("jupyter*",)), job(), live(job_names=("jupyter\n" + "x" * 8192,)), True),
        (Match(job_names=("jupyter*",)), job(), live(job_names=("Jupyter",)), False),
        (Match(job_names=("jupyter*",)), job(), live(job_names=("*",)), False),
        (Match(job_names=("caf?",)), job(), live(job_names=("caf\N{REPLACEMENT CHARACTER}",)), True),
        (Match(job_names=("?*",)), job(), live(job_names=("",)), False),
        (Match(job_names=("*",)), job(), live(job_names=("",)), True),
        (Match(job_names=("*",)), job(), live(), "Slurm does not show its job name"),
        (Match(job_names=("*",)), job(), None, "its live object is not read here"),
        (Match(job_names=("*",)), pod(), POD, False),
        (Match(reservations=("course-*",)), job(), live(reservations=("course-101",)), True),
        (Match(reservations=("*",)), job(), live(reservations=()), False),
        (Match(reservations=("*",)), job(), live(), "Slurm does not show its reservation"),
        (Match(reservations=("course-*",)), job(), live(reservations=("course-1", "course-2")), True),
        (Match(reservations=("course-*",)), job(), live(reservations=("lab", "night")), False),
        (
            Match(reservations=("course-*",)),
            job(),
            live(reservations=("course-1", "lab")),
            "Slurm does not show which reservation it uses: 'course-1,lab'",
        ),
        (Match(partitions=("debug",), job_names=("a",)), job(partition="gpu"), live(), False),
        # One criterion that fails is enough, even if others are unknown.
        (Match(accounts=("phys",), qos=("low",)), job(qos="high"), None, False),
        (Match(accounts=("phys",), models=("*",)), job(account="chem"), None, False),
    ],
)
def test_a_policy_matches_holders_that_meet_all_of_its_criteria(
    match: Match, seen: HolderEvidence, around: Surroundings | None, wanted: bool | str
) -> None:
    assert matches(match, seen, around) == wanted


def test_a_holder_whose_series_name_two_accounts_has_an_unknown_account() -> None:
    two = job()._replace(facts={"account": frozenset(["chem", "phys"])})
    assert matches(Match(accounts=("phys",)), two, None) == "its series have more than one account: ['chem', 'phys']"


def test_the_first_policy_that_matches_decides_and_no_policy_is_tried_after_an_unknown_match() -> None:
    careful = PolicyRule("careful", Match(accounts=("phys",)), exempt="theirs")
    bold = PolicyRule("bold", Match(), (("candidate_after", 5 * M), ("underused_after", 10 * M)))
    book = Rulebook(POLICY, [careful, bold])
    assert book.choose(job(account="phys"), None) == Chosen(POLICY, careful, "account 'phys'")
    assert book.choose(job(account="chem"), None).policy.underused_after == 10 * M
    said = NotKnown("it is not known whether policy careful matches: the series do not name the account")
    assert book.choose(job(), None) == said
    assert Rulebook(POLICY, [careful]).choose(job(account="chem"), None) == Chosen(POLICY, None)


def decided(seen: HolderEvidence, around: Surroundings | None, *rules: PolicyRule) -> Decision:
    """Decide as the judge does: first by the loosest policy, then by the surroundings."""
    book, evidence = Rulebook(POLICY, rules), Evidence(WALL, (seen,))
    live = {seen.name: around} if around is not None else {}
    (decision,) = settle(evidence, decide(evidence, book.loosest), live, book)
    return decision


values = st.sampled_from(["jupyter", "train", "course-1", ""])
patterns = st.sampled_from(["jupyter", "course-*", "*", "?*", "t*"])
matches_of_jobs = st.fixed_dictionaries(
    {}, optional={key: st.lists(patterns, min_size=1, max_size=2).map(tuple) for key in ("job_names", "reservations")}
)
effects = st.sampled_from(
    [
        {"exempt": "a course"},
        {"ceiling": "candidate"},
        {"changes": (("candidate_after", 20 * M), ("underused_after", 30 * M))},
        {"changes": (("candidate_after", 240 * M), ("underused_after", 300 * M))},
    ]
)


@given(
    st.lists(st.tuples(matches_of_jobs, effects), max_size=3), st.sampled_from(["job_names", "reservations"]), values
)
def test_an_unknown_value_leads_to_a_mark_only_if_every_value_leads_to_the_same_mark(
    drawn: list[tuple[dict[str, tuple[str, ...]], dict[str, object]]], hidden: str, other: str
) -> None:
    rules = [PolicyRule(f"p{i}", Match(**match), **effect) for i, (match, effect) in enumerate(drawn)]  # type: ignore[arg-type]
    known = {"job_names": (other,), "reservations": (other,) if other else ()}
    del known[hidden]
    unknown = decided(job(), live(**known), *rules)
    assert unknown.stage in (*LABELLED, "active", "exempt", "unknown")
    if unknown.stage in LABELLED:
        for value in ((), ("jupyter",), ("train",), ("course-1", "train")):
            if hidden == "reservations" or len(value) == 1:
                shown = decided(job(), live(**known, **{hidden: value}), *rules)
                assert (shown.stage, shown.windows) == (unknown.stage, unknown.windows)


@given(st.lists(st.text(max_size=9), min_size=1, max_size=3), st.text(max_size=30))
def test_a_job_name_matches_as_the_names_of_files_do(drawn: list[str], name: str) -> None:
    wanted = any(fnmatchcase(name, pattern) for pattern in drawn)
    assert matches(Match(job_names=tuple(drawn)), job(), live(job_names=(name,))) is wanted


def test_explain_names_the_policy_of_a_job_and_the_values_that_match_it() -> None:
    hours = (("candidate_after", 240 * M), ("underused_after", 300 * M))
    notebooks = PolicyRule("notebooks", Match(job_names=("jupyter*",), partitions=("gpu",)), hours)
    course = PolicyRule("course", Match(reservations=("course-*",)), exempt="a course")
    seen = job(partition="gpu")
    longer = live(job_names=("jupyter\n" + "x" * 8192,), reservations=())
    text = explain(decided(seen, longer, course, notebooks), POLICY)
    assert "  policy notebooks (partition 'gpu', job name 'jupyter\\nxxxxxxxx" in text
    assert "'): candidate after 4h, underused after 5h, " in text
    assert len(text) < 1000
    exempt = decided(seen, live(job_names=("jupyter",), reservations=("course-101",)), course, notebooks)
    assert exempt.reason == "its one GPU idle for 150 min, but policy course exempts it: a course"
    assert "  policy course (reservation 'course-101'): " in explain(exempt, POLICY)
    unknown = decided(seen, live(job_names=("jupyter",)), course, notebooks)
    assert (unknown.stage, unknown.reason) == (
        "unknown",
        "its one GPU idle for 150 min, but it is not known whether policy course matches: Slurm does not show its "
        "reservation",
    )


def test_explain_of_a_job_that_works_has_the_windows_of_its_policy() -> None:
    hours = (("candidate_after", 240 * M), ("underused_after", 300 * M))
    book = Book("slurm")
    book.around = {B: live(job_names=("jupyter",))}
    bench = Bench(book)
    bench.runs = {B: [60.0]}
    for rules, surveyed in (([PolicyRule("n", Match(job_names=("jupyter*",)), hours)], [([B], [])]), ([], [])):
        book.surveyed.clear()
        (decision,) = judge_of(bench, [book], Rulebook(POLICY, rules)).judge([B]).decisions
        windows = decision.windows
        assert windows is not None
        assert windows.candidate_s == (240 * M if rules else 60 * M)
        assert book.surveyed == surveyed
    course = PolicyRule("course", Match(job_names=("jupyter*",)), exempt="a course")
    (decision,) = judge_of(bench, [book], Rulebook(POLICY, [course])).judge([B]).decisions
    assert "  next: no mark, because policy course exempts it: a course\n" in explain(decision, POLICY)
    book.around = {B: Unreadable("squeue failed")}
    (decision,) = judge_of(bench, [book], Rulebook(POLICY, [PolicyRule("n", Match(job_names=("j*",)), hours)])).judge(
        [B]
    )[1]
    assert "  policy (it is not known whether policy n matches: its live object is not read here): " in explain(
        decision, POLICY
    )


QUICK = PolicyRule("quick", Match(namespaces=("ml",)), (("candidate_after", 20 * M), ("underused_after", 30 * M)))
SLOW = PolicyRule("slow", Match(namespaces=("ml",)), (("underused_after", 600 * M),))


@pytest.mark.parametrize(
    ("run_min", "rules", "around", "stage"),
    [
        (25, (), POD, "active"),
        (25, (QUICK,), POD, "candidate"),
        (25, (QUICK,), None, "candidate"),
        (35, (QUICK,), POD, "underused"),
        (70, (QUICK,), POD._replace(kind="interactive"), "candidate"),
        (70, (QUICK,), POD._replace(kind="serving"), "serving"),
        (70, (QUICK,), POD._replace(exemption=Exemption("pod", "its owner asked")), "exempt"),
        (70, (QUICK,), POD._replace(ceiling="a sign"), "candidate"),
        (130, (), POD, "underused"),
        (130, (SLOW,), POD, "candidate"),
        # Another policy has shorter windows, but does not match this holder.
        (25, (QUICK._replace(match=Match(namespaces=("lab",))),), POD, "active"),
        (70, (QUICK._replace(match=Match(namespaces=("lab",))),), POD, "candidate"),
        (130, (PolicyRule("p", Match(), ceiling="candidate"),), POD, "candidate"),
        (130, (PolicyRule("p", Match(), exempt="on trial"),), POD, "exempt"),
        (130, (PolicyRule("p", Match(), exempt="on trial"),), None, "exempt"),
        (130, (PolicyRule("p", Match(), exempt="on trial"),), POD._replace(kind="serving"), "exempt"),
        (130, (PolicyRule("p", Match(labels=(("a", "b"),)), exempt="on trial"),), None, "unknown"),
        (130, (PolicyRule("p", Match(), (("startup_grace", 1e6 * M),)),), POD, "starting"),
        (130, (PolicyRule("p", Match(), (("coverage_min", 0.99),)),), POD, "unknown"),
    ],
)
def test_the_stage_of_an_idle_run_depends_on_the_policy(
    run_min: float, rules: Sequence[PolicyRule], around: Surroundings | None, stage: str
) -> None:
    seen = holder(A, [run_min * M])
    seen = seen._replace(units=tuple(unit._replace(coverage=0.98) for unit in seen.units))
    assert decided(seen, around, *rules).stage == stage


def test_the_reason_of_a_decision_names_the_policy_and_explain_shows_its_windows() -> None:
    exempt = decided(holder(A, [9000.0]), POD, PolicyRule("p", Match(), exempt="on trial"))
    assert exempt.exempt_by == "policy"
    assert exempt.reason == "its one GPU idle for 150 min, but policy p exempts it: on trial"
    held = decided(holder(A, [9000.0]), POD, PolicyRule("p", Match(), ceiling="candidate"))
    assert held.reason.endswith("; it stays a candidate, because policy p allows no later stage")
    quick = decided(holder(A, [25 * M]), POD, QUICK)
    assert quick.windows is not None
    assert quick.needed_s == 20 * M
    assert "  policy quick: candidate after 20m, underused after 30m, " in explain(quick, POLICY)


def test_a_wish_for_a_longer_idle_time_than_that_of_the_policy_is_an_exemption() -> None:
    wish = POD._replace(idle_after_s=60 * M, idle_after_by=Exemption("pod", "idle-after of pod a is 1h"))
    said = decided(holder(A, [25 * M]), wish, QUICK)
    assert (said.stage, said.exempt_by) == ("exempt", "pod")
    # Its own policy needs a longer idle time anyway, so the wish has no effect.
    assert decided(holder(A, [25 * M]), wish, QUICK._replace(match=Match(namespaces=("lab",)))).stage == "active"


def test_a_member_whose_policy_has_longer_windows_keeps_its_gang_at_candidate() -> None:
    names = [HolderName("kubernetes", "ml", f"t-{i}") for i in range(2)]
    members = tuple(Member(name, "uid", 1) for name in names)
    around = {
        name: POD._replace(group="batch/v1/Job/t", members=members, labels={"team": str(i)})
        for i, name in enumerate(names)
    }
    late = PolicyRule("late", Match(labels=(("team", "1"),)), (("underused_after", 600 * M),))
    book, evidence = Rulebook(POLICY, [late]), Evidence(WALL, tuple(holder(name, [9000.0]) for name in names))
    stages = [each.stage for each in settle(evidence, decide(evidence, book.loosest), around, book)]
    assert stages == ["candidate", "candidate"]


changes = st.fixed_dictionaries(
    {},
    optional={
        "candidate_after": st.floats(60, 7200),
        "underused_after": st.floats(7200, 40_000),
        "interactive_after": st.floats(60, 90_000),
        "startup_grace": st.floats(60, 90_000),
        "coverage_min": st.floats(0.1, 1),
    },
)


def rule_of(name: str, namespace: str, changed: Mapping[str, float]) -> PolicyRule:
    return PolicyRule(name, Match(namespaces=(namespace,)), tuple(changed.items()))


@given(changes, changes, st.floats(0, 90_000), st.floats(0.1, 1), st.booleans())
def test_policies_that_do_not_match_a_holder_do_not_change_its_decision(
    own: Mapping[str, float], others: Mapping[str, float], run: float, coverage: float, around: bool
) -> None:
    """The decision is the same as with the holder's own policy alone."""
    seen = holder(A, [run])
    seen = seen._replace(units=tuple(unit._replace(coverage=coverage) for unit in seen.units))
    mine = rule_of("mine", "ml", own)
    live = POD if around else None
    wanted = decided(seen, live, mine)
    for rules in ([rule_of("theirs", "lab", others), mine], [mine, rule_of("theirs", "*", others)]):
        found = decided(seen, live, *rules)
        # A holder that the loosest policy does not mark is not judged further, so its reason may differ.
        assert found.stage == wanted.stage or {found.stage, wanted.stage}.isdisjoint(LABELLED)
        if wanted.stage in LABELLED:
            assert found == wanted


def test_the_loosest_policy_and_the_longest_window_consider_every_policy() -> None:
    rules = [QUICK, SLOW, PolicyRule("x", Match(mig=True), (("candidate_after", 1.0),), exempt="never judged")]
    book = Rulebook(POLICY, rules)
    assert (book.loosest.candidate_after, book.loosest.underused_after) == (20 * M, 30 * M)
    assert book.longest_s == POLICY.exempt_max + 540 * M
    days = POLICY._replace(host_delay_max=POLICY.exempt_max * 3)
    assert Rulebook(days).longest_s == POLICY.exempt_max * 3
    assert not book.asks_models
    assert Rulebook(POLICY, [PolicyRule("m", Match(models=("*",)))]).asks_models


def test_a_policy_can_limit_its_own_new_marks_per_cycle() -> None:
    few = QUICK._replace(changes=(("new_marks_max", 2),))
    book = Book()
    bench = Bench(book)
    bench.rules = [few]
    bench.restart()
    names = [HolderName("kubernetes", "ml", f"p-{i}") for i in range(5)]
    other = HolderName("kubernetes", "lab", "p")
    bench.runs = {name: [9000.0] for name in (*names, other)}
    bench.run()
    assert len(book.marks) == 3
    assert other in book.marks
    assert bench.skips == ["limit"] * 3
    bench.run()
    assert (len(book.marks), bench.skips) == (5, ["limit"])


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("a", ""), ("a", ""), ("a", ""), ("b", ""), ("c", "")], [True, True, False, True, False]),
        ([("a", "ada"), ("b", "ada"), ("c", "ada"), ("d", "")], [True, True, False, True]),  # a person with three
    ],
)
def test_limits_of_new_marks_count_in_all_and_per_tenant(places: list[tuple[str, str]], expected: list[bool]) -> None:
    limits = Limits(POLICY._replace(new_marks_max=3, new_marks_namespace_max=2))
    pods = [
        decided(holder(HolderName("kubernetes", namespace, "p"), [9000.0]), POD._replace(tenant=tenant))
        for namespace, tenant in places
    ]
    allowed = []
    for each in pods:
        allowed.append(limits.allow(each))
        if allowed[-1]:
            limits.count(each)
    assert allowed == expected


@pytest.mark.parametrize("fallible", [25, 70])
def test_a_holder_that_works_by_its_own_policy_is_active_even_if_another_policy_has_shorter_windows(
    fallible: float,
) -> None:
    """Its GPU worked 25 or 70 minutes ago, and its coverage is too low for every policy."""
    seen = holder(A, [fallible * M])
    seen = seen._replace(units=tuple(unit._replace(coverage=0.5) for unit in seen.units))
    quick = QUICK._replace(match=Match(namespaces=("lab",)))
    for around in (POD, None):
        alone, beside = decided(seen, around), decided(seen, around, quick)
        assert (beside.stage, beside.active, beside.reason, beside.windows) == (
            alone.stage,
            alone.active,
            alone.reason,
            alone.windows,
        )
    assert decided(seen, POD).active == (fallible < 60)


def test_a_mark_by_a_policy_with_short_windows_remains_on_a_young_container() -> None:
    """The check before the evidence uses the windows of the holder's policy and not those of the section `policy`."""
    book = Book()
    bench = Bench(book)
    bench.rules = [QUICK]
    bench.restart()
    book.able_s[A] = 40 * M  # its container has run for 40 min
    bench.runs = {A: [35 * M]}
    assert bench.run() == ["write a underused"]
    for _ in range(3):
        bench.clock.advance(30.0)
        assert [call for call in bench.run() if "withdraw" in call] == []
    bench.restart()  # the new process remembers nothing
    assert [call for call in bench.run() if "withdraw" in call] == []


def test_an_explanation_of_an_unmarked_holder_has_the_numbers_of_its_own_policy() -> None:
    quick = QUICK._replace(match=Match(namespaces=("lab",)))
    text = explain(decided(holder(A, [5 * M]), POD, quick), POLICY)
    assert "longest idle run 5 min, below 60 min" in text
    assert "  policy: candidate after 1h, underused after 2h, " in text


@pytest.mark.parametrize("rules", [(PolicyRule("p", Match(), ceiling="candidate"),), ()])
def test_texts_about_a_capped_candidate_announce_no_higher_stage(rules: Sequence[PolicyRule]) -> None:
    around = POD if rules else POD._replace(ceiling="a sign of others")
    candidate = decided(holder(A, [70 * M]), around, *rules)
    assert candidate.stage == "candidate"
    assert "next: it stays a candidate" in explain(candidate, POLICY)
    assert "It stays at this stage" in event_note(candidate, POLICY, WALL)


def test_a_holder_with_unreadable_surroundings_is_active_by_its_own_policy() -> None:
    quick = QUICK._replace(match=Match(namespaces=("lab",)))
    book, evidence = Rulebook(POLICY, [quick]), Evidence(WALL, (holder(A, [25 * M]),))
    (decision,) = settle(evidence, decide(evidence, book.loosest), {A: Unreadable("no rights")}, book)
    assert (decision.stage, decision.active) == ("active", True)
    evidence = Evidence(WALL, (holder(A, [70 * M]),))
    (decision,) = settle(evidence, decide(evidence, book.loosest), {A: Unreadable("no rights")}, book)
    assert (decision.stage, decision.reason) == ("unknown", "its one GPU idle for 70 min, but no rights")
