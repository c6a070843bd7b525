"""Two users of Slurm never have one name, in whatever order their jobs, names and restarts come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.attribution.slurm_cluster import Cluster

from gpu_exporter.agent.attribution.identity import apply_identity
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.slurm.users import FILE, User, UserNames
from gpu_exporter.agent.ledger.tenants import tenant_of
from gpu_exporter.common.vendor import NVIDIA

TWO = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
NAMELESS = "Slurm reported no name for 2 users, shown as uid:N: check `getent passwd N` on the host that asks slurmctld"
DOUBLED = "1 user names belong to several uids; these users are shown as uid:N: check the user directories"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def hold_two(cluster: Cluster, first: tuple[str, str], second: tuple[str, str]) -> list[str]:
    """The users of the two jobs, which have a GPU each."""
    cluster.jobs, cluster.used = TWO, "gpu:h100:2(IDX:0-1)"
    cluster.users = {"42": first, "43": second}
    return [grant.holder.user for grant in cluster.source.poll().grants]


@pytest.mark.parametrize("name", ["nobody", "N/A", "Unknown", "4294967294"])
def test_two_users_without_a_name_have_two_rows_and_a_notice(cluster: Cluster, name: str) -> None:
    assert hold_two(cluster, (name, "1001"), (name, "1002")) == ["uid:1001", "uid:1002"]
    answer = cluster.source.poll()
    assert answer.notice == NAMELESS
    assert len({tenant_of(grant.holder) for grant in answer.grants}) == 2


def test_one_name_with_two_uids_is_shown_as_two_users(cluster: Cluster) -> None:
    assert hold_two(cluster, ("ada", "1001"), ("ada", "2001")) == ["uid:1001", "uid:2001"]
    assert cluster.source.poll().notice == DOUBLED


def test_the_uid_of_a_user_is_published_only_as_the_setting_says(cluster: Cluster) -> None:
    hold_two(cluster, ("nobody", "1001"), ("ada", "4294967294"))
    holders = [grant.holder for grant in cluster.source.poll().grants]
    assert [apply_identity(holder, "uid", None).user for holder in holders] == ["1001", ""]
    assert [apply_identity(holder, "none", None).user for holder in holders] == ["", ""]
    assert [apply_identity(holder, "name", None).user for holder in holders] == ["uid:1001", "ada"]


def test_a_name_that_the_prolog_reported_replaces_a_placeholder(cluster: Cluster, tmp_path: Path) -> None:
    """A node without the site's directory resolves no uid, but slurmctld's host does, and the prolog has its names."""
    (tmp_path / "jobs").mkdir()
    lines = "job=42 gpus=0 visible= user=ada uid=1001 account=phys partition=gpu cluster=other restarts=0 nodes=1"
    (tmp_path / "jobs" / "42").write_text("\n".join([*lines.split(), ""]))
    options = SlurmOptions(node="n0", procfs=tmp_path / "proc", job_files=tmp_path / "jobs")
    cluster.source = SlurmSource(options, run=cluster.run, clock=cluster.clock, pace=Pace(0.0), vendor=NVIDIA)
    assert hold_two(cluster, ("nobody", "1001"), ("nobody", "1002")) == ["ada", "uid:1002"]


def test_a_name_of_two_uids_is_still_known_after_a_restart(tmp_path: Path) -> None:
    first, second = User("ada", "1001"), User("ada", "2001")
    names = UserNames(tmp_path, "n0")
    names.note([first])
    assert names.show(first).name == "ada"
    names = UserNames(tmp_path, "n0")
    names.note([second])
    assert names.show(second).name == "uid:2001"
    for known in (UserNames(tmp_path, "n0"), UserNames(tmp_path, "n0", writes=False)):
        assert known.show(first).name == "uid:1001"
    assert UserNames(tmp_path, "n1").show(first).name == "ada"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_name_of_two_uids_is_not_shown_for_a_job_without_a_uid() -> None:
    names = UserNames(None, "n0")
    names.note([User("ada", "1001"), User("ada", "2001")])
    assert names.show(User("ada", "")) == ("", "")


def test_a_name_that_resolves_again_ends_the_notice() -> None:
    names = UserNames(None, "n0")
    assert names.show(User("nobody", "1001")).name == "uid:1001"
    assert len(names.list_notices()) == 1
    names.note([User("ada", "1001")])
    assert names.show(User("nobody", "1001")).name == "ada"
    assert names.list_notices() == []


def test_another_user_with_a_remembered_uid_does_not_get_the_old_name(tmp_path: Path) -> None:
    """Only names since the start replace a placeholder: in the years before, the uid may have had another user."""
    UserNames(tmp_path, "n0").note([User("ada", "1001")])
    assert UserNames(tmp_path, "n0").show(User("nobody", "1001")).name == "uid:1001"


@pytest.mark.parametrize("body", ['{"ada": [""]}', '{"ada": []}', '{"ada": [null]}', '{"ada": "12"}', '["ada"]', "7"])
def test_a_damaged_file_of_users_is_ignored_with_a_message(
    tmp_path: Path, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(f'{{"version": 1, "node": "n0", "body": {body}}}')
    names = UserNames(tmp_path, "n0")
    assert FILE in caplog.text
    names.note([User("ada", "1001")])
    assert json.loads((tmp_path / FILE).read_text())["body"] == {"ada": ["1001"]}


USERS = st.builds(
    User, st.sampled_from(["ada", "bob", "nobody", "1001", ""]), st.sampled_from(["1001", "1002", "65534"])
)


@given(st.lists(st.lists(USERS, min_size=1, max_size=4), max_size=5))
def test_two_uids_of_one_poll_never_have_one_name(polls: list[list[User]]) -> None:
    names = UserNames(None, "n0")
    for users in polls:
        names.note(users)
        shown = {(names.show(user).name, user.uid) for user in users}
        assert len({name for name, _ in shown}) >= len({uid for _, uid in shown})
        by_name: dict[str, str] = {}
        for name, uid in shown:
            assert by_name.setdefault(name, uid) == uid
