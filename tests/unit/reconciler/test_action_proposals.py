"""Which acts are proposed, what proves a warning, and which settings actions need."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.unit.reconciler.actions_bench import ALL, ROOT, WALL, decision, job

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.config.defaults import Actions, Policy, Settings
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.proofs import ALERT, parse_alerts
from gpu_exporter.reconciler.actions.propose import propose, what_may_follow
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.kubernetes.targets import _obstacle
from gpu_exporter.reconciler.report import explain
from gpu_exporter.reconciler.runtime.actions import ProofPlaces, check_actions
from gpu_exporter.reconciler.slurm.live import LiveJob
from gpu_exporter.reconciler.slurm.survey import describe


@pytest.mark.parametrize(
    ("decisions", "kinds", "expected"),
    [
        ([decision()], ALL, ("suspend", "deactivate")),
        ([decision()], ("stop",), "kind"),
        ([decision(kind="interactive")], ALL, "class"),
        ([decision(kind="unclear")], ALL, "class"),
        ([decision(kind="serving")], ALL, "class"),
        ([decision(around=None)], ALL, "unknown"),
        ([decision(group="")], ALL, "kind"),
        ([decision(group="v1/Pod/leader")], ALL, "kind"),
        ([decision(group="apps/v1/Deployment/web")], ALL, "kind"),
        ([decision(group="apps/v1/StatefulSet/db")], ALL, "kind"),
        ([decision(group="ray.io/v1/RayCluster/r")], ALL, "kind"),
        ([decision(group="example.org/v1/Job/train")], ALL, "kind"),
        ([decision(group="kubeflow.org/v1/MPIJob/m")], ALL, ("suspend", "deactivate")),
        ([decision(group="kubeflow.org/v1/Notebook/n", kind="interactive")], ALL, ("stop",)),
        ([decision(group="kubeflow.org/v1/Notebook/n", kind="batch")], ALL, "class"),
        ([decision(members="ab")], ALL, "members"),
        ([decision("a", members="ab"), decision("b", members="ab")], ALL, ("suspend", "deactivate")),
        ([job()], ALL, ("requeue",)),
        ([job()], ("cancel",), ("cancel",)),
        ([job(kind="interactive")], ALL, ("cancel",)),
        ([job(kind="unclear")], ALL, "class"),
        ([job(members="ab")], ALL, "members"),
    ],
)
def test_the_proposed_acts_depend_on_kind_class_and_settings(
    decisions: list[Decision], kinds: tuple[str, ...], expected: object
) -> None:
    proposals, held = propose(decisions, kinds)
    if isinstance(expected, str):
        assert ([each.skipped.reason for each in held], proposals) == ([expected], [])
    else:
        ((proposal,), nothing) = proposals, held
        assert (proposal.possible, proposal.names, nothing) == (expected, {each.name for each in decisions}, [])


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        ({}, {"mode": "none", "kinds": "suspend"}, ""),
        (
            {},
            {"mode": "act", "kinds": "suspend"},
            "suspend batch/v1/Job/train, once its owner has been warned for 2h and",
        ),
        ({}, {"mode": "shadow", "kinds": "suspend, stop"}, "(in mode shadow, the reconciler only counts it)"),
        (
            {},
            {"mode": "act", "kinds": "stop,cancel"},
            "the reconciler does not act on it: actions.kinds allows none of suspend, ",
        ),
        ({"stage": "candidate"}, {"mode": "act", "kinds": "suspend"}, ""),
        ({"around": Surroundings("", kind="batch")}, {"mode": "act", "kinds": "suspend"}, "a pod without a controller"),
        ({"around": None}, {"mode": "act", "kinds": "suspend"}, "its surroundings are not known"),
    ],
)
def test_explain_names_the_act_that_may_follow(change: dict[str, Any], settings: dict[str, str], expected: str) -> None:
    asked = decision()._replace(**change)
    text = what_may_follow(asked, Actions(**settings))  # type: ignore[arg-type]
    assert expected in text and (bool(text) == bool(expected))
    assert ("  action: " in explain(asked, Policy(), action=text)) == bool(text)


LIVE = LiveJob("92", "92", "RUNNING", 1.0, 0, "", is_batch=True, gpus=1, asks=True, may_requeue=True, user="ada")
OK = LIVE._replace(comment="gpu-requeue-ok")
NEXT = LIVE._replace(job_id="93", target="93", state="PENDING", waits_for=frozenset(("92",)))


@pytest.mark.parametrize(
    ("live", "others", "kinds", "expected"),
    [
        (OK, [], "requeue,cancel", "requeue job 92, once"),
        (OK, [NEXT], "requeue,cancel", "requeue job 92, once"),  # it runs again, so the other one may wait
        (OK._replace(restarts=1), [], "requeue,cancel", "does not act on it: Slurm has already started it again once;"),
        (OK, [], "cancel", "cancel job 92, once"),
        (OK._replace(may_requeue=False), [], "requeue,cancel", "cancel job 92, once"),
        (LIVE, [], "requeue,cancel", "cancel job 92, once"),
        (LIVE._replace(restarts=3), [], "requeue,cancel", "cancel job 92, once"),
        (LIVE, [], "requeue", "does not act on it: actions.kinds allows none of cancel;"),
        (LIVE, [NEXT], "requeue,cancel", "does not act on it: job 93 waits for the end of this job;"),
        (OK, [NEXT], "cancel", "does not act on it: job 93 waits for the end of this job;"),
        (LIVE, [NEXT._replace(user="eve")], "requeue,cancel", "cancel job 92, once"),
        (LIVE, [NEXT._replace(state="COMPLETED")], "requeue,cancel", "cancel job 92, once"),
        (LIVE._replace(leader="92"), [OK._replace(job_id="95", leader="92")], "requeue,cancel", "cancel job 92, once"),
    ],
)
def test_explain_names_the_act_that_would_be_done_on_a_job_and_who_waits(
    live: LiveJob, others: list[LiveJob], kinds: str, expected: str
) -> None:
    """The same conditions as for the action itself."""
    around = describe(live, [live, *others], Policy())
    asked = job("92")._replace(around=around)
    assert expected in f"{what_may_follow(asked, Actions(mode='act', kinds=kinds))};"


def test_the_longest_idle_group_comes_first_and_its_youngest_idle_run_counts() -> None:
    old, young = decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")
    young = young._replace(idle_since_wall=WALL - 8000)
    pair = [decision(pod, "batch/v1/Job/c", members="cd") for pod in "cd"]
    pair[1] = pair[1]._replace(idle_since_wall=WALL - 7300)
    proposals, _ = propose([young, *pair, old], ALL)
    assert [each.target.name for each in proposals] == ["a", "b", "c"]
    assert proposals[2].since_wall == WALL - 7300 and proposals[2].gpus == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"labels": {}}]', "[" * 100_000, '{"status": "error"}'])
def test_a_text_that_is_no_answer_of_alertmanager_proves_nothing(text: str) -> None:
    if text == "{}":
        assert parse_alerts(text, ()) == []
        return
    with pytest.raises(AnswerError, match="cannot parse Alertmanager's answer"):
        parse_alerts(text, ())


def test_the_alert_that_proves_a_warning_is_an_alert_to_owners() -> None:
    groups = yaml.safe_load((ROOT / "alerts" / "rules" / "owners.yaml").read_text("utf-8"))["groups"]
    (alert,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == ALERT]
    assert alert["labels"]["audience"] == "owner"


@pytest.mark.parametrize(
    ("changes", "witnesses", "audit", "keeps", "problem"),
    [
        ({"mode": "none"}, (None, None), False, False, ""),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", "http://a"), False, True, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), True, True, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), False, True, "--audit.file"),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), True, False, "--state.directory"),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", None), True, True, "--alertmanager.url"),
        ({"mode": "shadow", "kinds": "stop"}, (None, "http://a"), True, True, "--source.prometheus"),
        ({"mode": "act"}, ("http://p", "http://a"), True, True, "actions.kinds is empty"),
    ],
)
def test_the_reconciler_does_not_start_with_actions_but_without_proofs_or_audit(
    changes: dict[str, str], witnesses: tuple[str | None, str | None], audit: bool, keeps: bool, problem: str
) -> None:
    settings = Settings()._replace(actions=Actions(**changes))  # type: ignore[arg-type]
    prometheus, alertmanager = (parse_address(text) if text else None for text in witnesses)
    places = ProofPlaces(prometheus, "", alertmanager, ())
    if not problem:
        check_actions(settings, places, has_audit=audit, keeps_texts=keeps)
        return
    with pytest.raises(ValueError, match=problem):
        check_actions(settings, places, has_audit=audit, keeps_texts=keeps)


def test_credentials_are_sent_to_the_same_server_only() -> None:
    source = parse_address("https://mimir:443/prometheus")
    assert source.is_same_server(parse_address("https://MIMIR:443/alertmanager"))
    for other in ("http://mimir:443/", "https://mimir/", "https://alertmanager:443/"):
        assert not source.is_same_server(parse_address(other))


def test_the_counters_of_actions_and_of_held_reasons_exist_from_the_start() -> None:
    from gpu_exporter.reconciler.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.note_actions(["suspend"])
    assert (
        telemetry.registry.get_sample_value("gpu_reconciler_actions_total", {"action": "suspend", "result": "done"})
        == 0
    )
    names: dict[str, str] = {"reason": "not_warned"}
    assert telemetry.registry.get_sample_value("gpu_reconciler_actions_skipped_total", names) == 0


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        ({"metadata": {"deletionTimestamp": "2027-01-01T00:00:00Z"}}, "terminating"),
        ({"metadata": {"annotations": {"kubeflow-resource-stopped": "2027"}}}, "rests"),
        ({"metadata": {}, "spec": {"suspend": True}}, "rests"),
        ({"metadata": {}, "spec": {"runPolicy": {"suspend": True}}}, "rests"),
        ({"metadata": {}, "spec": {"active": False}}, "rests"),
        *(
            ({"metadata": {}, "status": {"conditions": [{"type": kind, "status": "True"}]}}, "ended")
            for kind in ("Complete", "Failed", "Completed", "Succeeded", "Finished")
        ),
        ({"metadata": {}, "status": {"conditions": [{"type": "Failed", "status": "False"}]}}, ""),
        ({"metadata": {}, "spec": {"suspend": False, "runPolicy": None, "active": True}, "status": None}, ""),
    ],
)
def test_no_act_on_an_object_that_ends_or_is_suspended(live: dict[str, Any], reason: str) -> None:
    held = _obstacle(live, "it")
    assert (held.reason if held is not None else "") == reason
