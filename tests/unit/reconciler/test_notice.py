"""The texts of a mark: the whole text of its Event and of its condition."""

from __future__ import annotations

import pytest

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import Decision, Windows
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderName, PublishedCause, UnitEvidence
from gpu_exporter.reconciler.kubernetes.marker import annotate
from gpu_exporter.reconciler.kubernetes.notice import CONDITION, condition, event_note

WALL = 1_800_000_000.0  # 2027-01-15 08:00 UTC
CANDIDATE = Decision(
    HolderName("kubernetes", "ml", "train"), "", "candidate", "all 2 GPUs idle for 60 min", (), 2, WALL - 3600
)
KEEP = (
    "To keep its GPUs: kubectl annotate --overwrite -n ml pod train gpu-exporter.io/exempt-until=2027-01-15T12:00:00Z"
)


@pytest.mark.parametrize(
    ("decision", "comes_next"),
    [
        (CANDIDATE, "It becomes underused when its GPUs have been idle for 2h"),
        (
            CANDIDATE._replace(windows=Windows(3600.0, 14400.0)),
            "It becomes underused when its GPUs have been idle for 4h",
        ),
        (CANDIDATE._replace(around=Surroundings(ceiling="pod train has a sign")), "It stays at this stage"),
        (
            CANDIDATE._replace(stage="partial"),
            "It does not become underused while some of its GPUs work. If these are enough, request fewer GPUs",
        ),
        (
            CANDIDATE._replace(stage="underused"),
            "From now on, other tools may take its GPUs back. Work on a GPU ends the mark",
        ),
    ],
)
def test_an_event_says_what_comes_next_and_how_to_keep_the_gpus(decision: Decision, comes_next: str) -> None:
    assert event_note(decision, Policy(), WALL) == f"all 2 GPUs idle for 60 min. {comes_next}. {KEEP}"


def test_the_command_in_an_event_asks_for_no_longer_time_than_the_site_allows() -> None:
    note = event_note(CANDIDATE, Policy()._replace(exempt_max=3600.0), WALL)
    assert note.endswith("gpu-exporter.io/exempt-until=2027-01-15T09:00:00Z")


def test_the_help_page_of_the_site_is_in_the_event_and_on_the_pod() -> None:
    page = "https://docs.example.org/gpu"
    assert event_note(CANDIDATE, Policy()._replace(help_url=page), WALL).endswith(f"Z; help: {page}")
    assert annotate(CANDIDATE, page)["gpu-exporter.io/help"] == page
    assert "gpu-exporter.io/help" not in annotate(CANDIDATE)


def test_a_condition_names_its_numbers_and_keeps_the_time_of_its_transition() -> None:
    body = {
        "type": "gpu-exporter.io/Underused",
        "status": "True",
        "reason": "AllIdle",
        "message": "2 of 2 GPUs idle since 2027-01-15 07:00Z; to keep them: annotation gpu-exporter.io/exempt-until",
        "lastProbeTime": "2027-01-15T08:00:00Z",
    }
    assert body["type"] == CONDITION
    assert condition(CANDIDATE, WALL, None) == body
    assert condition(CANDIDATE, WALL, WALL - 60.0) == {**body, "lastTransitionTime": "2027-01-15T07:59:00Z"}


def test_the_mark_names_the_cause_and_what_to_change_and_forgets_both_with_the_cause() -> None:
    low, medium = PublishedCause("far_numa", "medium"), PublishedCause("no_process", "high")
    unit = UnitEvidence("n1", "0", "GPU-0", "", 0.0, 3600.0, 1.0, 1.0, 3, causes=(low, medium))
    found = CANDIDATE._replace(units=(unit,))
    said = (
        "nothing runs on the GPU (no_process, high confidence); to change: end the job if its work is done, or ask for a "
        "GPU only in the step that uses it"
    )
    assert annotate(found)["gpu-exporter.io/cause"] == said
    assert f". Likely cause: {said}. It becomes underused" in event_note(found, Policy(), WALL)
    assert annotate(CANDIDATE)["gpu-exporter.io/cause"] is None, "a merge patch with null removes an earlier one"
    loaders = found._replace(units=(unit._replace(causes=(PublishedCause("too_few_workers", "high"),)),))
    server = loaders._replace(around=Surroundings(kind="serving", kind_why="the Service chat selects its pod"))
    assert "to change: raise num_workers" in (annotate(loaders)["gpu-exporter.io/cause"] or "")
    assert annotate(server)["gpu-exporter.io/cause"] == "too few loaders (too_few_workers, high confidence)"
