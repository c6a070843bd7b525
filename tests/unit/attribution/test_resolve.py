"""Resolving grants to units."""

from __future__ import annotations

from gpu_exporter.agent.attribution.resolve import find_offered, resolve
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, InstanceReading
from gpu_exporter.common.model.units import DeviceIdentity, UnitId


def snapshot(index: int, minor: int, mig: str = "") -> DeviceSnapshot:
    instances = (InstanceReading(mig, "7/0", "3g.40gb", 3, (), None),) if mig else ()
    identity = DeviceIdentity(index, f"GPU-{index}", "H100", "580", "0000:00", minor)
    return DeviceSnapshot(identity, 0.0, 0.0, True, instances=instances)


SNAPSHOTS = [snapshot(0, 3), snapshot(1, 2), snapshot(2, 1, mig="MIG-a")]  # reported with MIG mode off: only names
POD = Holder(HolderKey("kubernetes", "uid/main"), pod="a", source="kubelet")
POD2 = Holder(HolderKey("kubernetes", "uid2/main"), pod="b", source="kubelet")
JOB = Holder(HolderKey("slurm", "lab/7/0/1"), job_id="7", source="slurm")


def units(*grants: Grant) -> list[tuple[UnitId, str, float]]:
    return [(a.unit, a.share, round(a.share_ratio, 3)) for a, _ in resolve(grants, SNAPSHOTS).allocations]


def test_uuid_minor_and_index_name_different_gpus() -> None:
    assert units(Grant("uuid", "GPU-1", POD)) == [(UnitId("GPU-1"), "none", 1.0)]
    assert units(Grant("minor", "3", JOB)) == [(UnitId("GPU-0"), "none", 1.0)]
    assert units(Grant("index", "1", JOB)) == [(UnitId("GPU-1"), "none", 1.0)]


def test_a_mig_instance_is_found_by_its_new_and_old_name() -> None:
    expected = [(UnitId("GPU-2", "MIG-a"), "mig", 0.429)]
    assert units(Grant("uuid", "MIG-a", POD)) == expected
    assert units(Grant("uuid", "MIG-GPU-2/7/0", POD)) == expected


def test_a_number_never_means_a_partitioned_gpu() -> None:
    identity = snapshot(3, 0).identity
    mig = SNAPSHOTS[2].__class__(identity._replace(mig_mode="enabled"), 0.0, 0.0, True)
    result = resolve([Grant("index", "3", JOB), Grant("minor", "0", JOB)], [mig])
    assert (result.allocations, len(result.unresolved)) == ([], 2)
    beside = resolve([Grant("index", "0", JOB), Grant("minor", "3", JOB)], [SNAPSHOTS[0], mig])
    assert [a.unit for a, _ in beside.allocations] == [UnitId("GPU-0")]  # by device file; positions may be shifted
    assert [grant.kind for grant, _ in beside.unresolved] == ["index"]


def test_replicas_of_one_gpu_share_it() -> None:
    assert units(Grant("uuid", "GPU-0::0", POD), Grant("uuid", "GPU-0::1", POD2)) == [
        (UnitId("GPU-0"), "time_slice", 0.5),
        (UnitId("GPU-0"), "time_slice", 0.5),
    ]


def test_a_single_replica_counts_as_shared_because_others_may_follow() -> None:
    assert units(Grant("uuid", "GPU-0::0", POD)) == [(UnitId("GPU-0"), "time_slice", 1.0)]


def test_two_holders_of_a_whole_gpu_share_it() -> None:
    assert [share for _, share, _ in units(Grant("uuid", "GPU-0", POD), Grant("uuid", "GPU-0", POD2))] == [
        "time_slice"
    ] * 2


def test_two_replicas_of_one_holder_are_one_allocation() -> None:
    assert len(units(Grant("uuid", "GPU-0::0", POD), Grant("uuid", "GPU-0::1", POD))) == 1


def test_two_schedulers_on_one_gpu_conflict_and_the_first_source_counts() -> None:
    result = resolve([Grant("uuid", "GPU-0", POD), Grant("minor", "3", JOB)], SNAPSHOTS)
    assert [a.holder for a, _ in result.allocations] == [POD]
    assert [grant.holder for grant in result.conflicts] == [JOB]


def test_a_task_of_a_job_array_is_the_same_holder_by_both_of_its_names() -> None:
    task = JOB._replace(job_id="3011", array_job_id="3010", array_task_id="1")
    for job_id, conflicts in (("3011", 0), ("3010_1", 0), ("3010", 1), ("3010_2", 1)):
        static = Holder(HolderKey("slurm", job_id), job_id=job_id, source="static")
        result = resolve([Grant("uuid", "GPU-0", task), Grant("uuid", "GPU-0", static)], SNAPSHOTS)
        assert len(result.conflicts) == conflicts, job_id


def test_two_sources_that_name_the_same_holder_agree() -> None:
    static = JOB._replace(key=HolderKey("slurm", "7"), source="static")
    result = resolve([Grant("uuid", "GPU-0", static), Grant("minor", "3", JOB)], SNAPSHOTS)
    assert [(a.holder.source, a.share) for a, _ in result.allocations] == [("static", "none")]
    assert result.conflicts == []


def test_a_device_that_is_not_here_is_unresolved_and_never_guessed() -> None:
    result = resolve([Grant("uuid", "GPU-9", POD), Grant("index", "17", JOB)], SNAPSHOTS)
    assert result.allocations == []
    assert len(result.unresolved) == 2


def order(*minors: int) -> list[DeviceSnapshot]:
    """A node with these minor numbers, by GPU index."""
    return [snapshot(index, minor) for index, minor in enumerate(minors)]


def where(grant: Grant, snapshots: list[DeviceSnapshot], incomplete: str = "") -> str:
    """The UUID, or the reason if there is no UUID."""
    result = resolve([grant], snapshots, incomplete=incomplete)
    return result.allocations[0][0].unit.uuid if result.allocations else result.unresolved[0][1]


def test_a_position_counts_only_while_every_gpu_is_here() -> None:
    grant = Grant("index", "1", JOB, number="IDX 1", total=4)
    assert where(grant, order(3, 1, 0, 2)) == "GPU-1"
    assert (
        where(grant, order(3, 1, 0)) == "a position may name another GPU: NVML lists 3 GPUs, but the scheduler counts 4"
    )
    assert where(grant, order(3, 1, 0, 2), "gpu 2 (GPU-2) does not answer") == (
        "positions may have changed: gpu 2 (GPU-2) does not answer"
    )
    holes = [entry for entry in order(3, 1, 0, 2) if entry.identity.index != 1]
    assert where(grant._replace(total=0), holes) == "a position may name another GPU: NVML's list has gaps"
    assert where(grant._replace(device="4", total=0), order(3, 1, 0, 2)) == "there is no GPU at position 4"


def test_a_position_among_listed_files_counts_in_nvmls_order() -> None:
    """AutoDetect=nvml with File=/dev/nvidia[0,2-3]: slurmd sorts the files by NVML's order, for any order in the file."""
    nodes = order(3, 1, 0, 2)
    grants = [Grant("index", str(i), JOB, number=f"IDX {i}", among=("0", "2", "3"), total=3) for i in range(3)]
    assert [where(grant, nodes) for grant in grants] == ["GPU-0", "GPU-2", "GPU-3"]
    assert where(grants[0]._replace(among=("0", "7")), nodes) == (
        "a position may name another GPU: NVML lists 1 GPUs, but the scheduler counts 3"
    )


def test_a_device_file_means_its_gpu_even_if_other_gpus_are_missing() -> None:
    assert where(Grant("minor", "0", JOB), order(3, 1, 0), "gpu 3 is missing") == "GPU-2"
    assert where(Grant("minor", "2", JOB), order(3, 1, 0)) == "no whole GPU here has the device file number 2"
    assert where(Grant("minor", "-1", JOB), [snapshot(0, -1)]) == "no whole GPU here has the device file number -1"


def test_an_unproven_number_means_no_device_and_has_a_reason() -> None:
    assert where(Grant("unproven", "1", JOB, reason="no gres.conf"), order(0, 1)) == "no gres.conf"


def test_a_running_holder_keeps_its_gpu_when_numbers_change() -> None:
    grant = Grant("index", "1", JOB, number="IDX 1")
    first = resolve([grant], order(0, 1, 2))
    assert first.numbers == {(JOB.key, "IDX 1"): UnitId("GPU-1")}
    moved = [snapshot(0, 0), snapshot(1, 2)]  # GPU-1 left the list
    moved[1] = moved[1]._replace(identity=moved[1].identity._replace(uuid="GPU-2"))
    kept = resolve([grant], moved, incomplete="gpu 1 is missing", numbers=first.numbers)
    assert [a.unit for a, _ in kept.allocations] == [UnitId("GPU-1")]
    assert kept.numbers == first.numbers
    unproven = resolve([grant._replace(kind="unproven")], moved, numbers=first.numbers)
    assert [a.unit for a, _ in unproven.allocations] == [UnitId("GPU-1")]
    other = JOB._replace(key=HolderKey("slurm", "lab/8/0/1"))
    assert resolve([grant._replace(holder=other)], moved, incomplete="x", numbers=first.numbers).allocations == []


def test_a_holder_known_only_by_name_keeps_no_number() -> None:
    grant = Grant("index", "1", POD._replace(identity="name"), number="1")
    assert resolve([grant], order(0, 1)).numbers == {}
    numbers = {(POD.key, "1"): UnitId("GPU-0")}
    assert [a.unit for a, _ in resolve([grant], order(0, 1), numbers=numbers).allocations] == [UnitId("GPU-1")]


def test_positions_are_not_valid_beside_a_gpu_in_mig_mode() -> None:
    nodes = order(0, 1)
    nodes[1] = nodes[1]._replace(identity=nodes[1].identity._replace(mig_mode="enabled"))
    reason = "a position names no GPU while a GPU of this node is in MIG mode"
    assert where(Grant("index", "0", JOB), nodes) == reason
    assert where(Grant("minor", "0", JOB), nodes) == "GPU-0"


def test_an_allocation_keeps_the_reason_why_its_holder_cannot_work() -> None:
    grant = Grant("uuid", "GPU-1", POD, running=False, why="its container has not started", working_wall=12.0)
    ((allocation, _),) = resolve([grant], SNAPSHOTS).allocations
    assert (allocation.running, allocation.why, allocation.working_wall) == (
        False,
        "its container has not started",
        12.0,
    )


def test_a_kept_number_means_a_whole_gpu_and_not_a_replica() -> None:
    grant = Grant("index", "1", JOB, number="IDX 1")
    result = resolve([grant], order(0, 1), numbers={(JOB.key, "IDX 1"): UnitId("GPU-1")})
    assert [allocation.share for allocation, _ in result.allocations] == ["none"]


def test_a_number_that_means_another_gpu_than_before_counts_for_neither_gpu() -> None:
    """gres.conf was corrected under a running job: it is unknown which GPU the job really has."""
    before = resolve([Grant("minor", "0", JOB, number="IDX 0")], order(0, 1)).numbers
    grants = [Grant("minor", "1", JOB, number="IDX 0"), Grant("uuid", "GPU-1", POD)]
    result = resolve(grants, order(0, 1), numbers=before)
    assert [allocation.holder for allocation, _ in result.allocations] == [POD]  # the pod is not affected
    assert [reason for _, reason in result.unresolved] == [
        "this index named GPU-0 when the holder began, and names GPU-1 now"
    ]
    assert result.conflicts == grants[:1]
    assert result.numbers == before


def test_a_holder_is_unknown_if_two_sources_disagree() -> None:
    result = resolve([Grant("uuid", "GPU-0", POD), Grant("uuid", "GPU-0", JOB)], SNAPSHOTS)
    ((allocation, _),) = result.allocations
    assert allocation.contradiction == f"kubelet reports {POD.label}, slurm reports job 7"
    alone = resolve([Grant("uuid", "GPU-0", POD), Grant("uuid", "GPU-1", JOB)], SNAPSHOTS).allocations
    assert [a.contradiction for a, _ in alone] == ["", ""]


def partitioned(*instances: InstanceReading, minor: int = 1) -> DeviceSnapshot:
    identity = DeviceIdentity(0, "GPU-p", "H100", "580", "0000:00", minor, "enabled")
    return DeviceSnapshot(identity, 0.0, 0.0, True, instances=instances)


def instance(
    uuid: str, mig: str, profile: str = "2g.20gb", placement: tuple[int, int] | None = None
) -> InstanceReading:
    return InstanceReading(uuid, mig, profile, 2, (), None, placement=placement)


def found(grant: Grant, *instances: InstanceReading) -> str:
    """UUID of the instance that a grant means, otherwise the reason why it means no instance."""
    result = resolve([grant], [partitioned(*instances)])
    return result.allocations[0][0].unit.mig_uuid if result.allocations else result.unresolved[0][1]


PLACED = (
    instance("MIG-a", "3/0", placement=(14, 0)),
    instance("MIG-b", "5/0", placement=(14, 2)),
    instance("MIG-c", "9/0", "1g.10gb", placement=(19, 4)),
)


def test_a_claimed_instance_is_found_by_its_placement() -> None:
    assert found(Grant("placement", "1/2g20gb/14/0", POD), *PLACED) == "MIG-a"
    assert found(Grant("placement", "1/2g20gb/14/2", POD), *PLACED) == "MIG-b"
    assert found(Grant("placement", "1/2g20gb/14/2", POD), *reversed(PLACED)) == "MIG-b"


def test_a_claim_means_no_device_until_its_instance_exists() -> None:
    """Dynamic MIG makes the instance when its pod starts."""
    for device in ("1/2g20gb/14/4", "1/1g10gb/15/4", "2/2g20gb/14/0"):
        assert found(Grant("placement", device, POD), *PLACED).startswith("no MIG instance matches")


def test_without_visible_placements_the_only_instance_of_a_profile_is_meant() -> None:
    blind = [each._replace(placement=None) for each in PLACED]
    assert found(Grant("placement", "1/1g10gb/19/4", POD), *blind) == "MIG-c"
    assert found(Grant("placement", "1/2g20gb/14/0", POD), *blind) == (
        "several MIG instances match 2g20gb-14-0 on the GPU with device file number 1"
    )


def test_without_visible_placements_two_claims_of_a_profile_are_not_resolved() -> None:
    """The only existing instance may belong to either claim."""
    alone = PLACED[0]._replace(placement=None)
    both = [Grant("placement", "1/2g20gb/14/0", POD), Grant("placement", "1/2g20gb/14/2", POD2)]
    result = resolve(both, [partitioned(alone)])
    assert (result.allocations, len(result.unresolved)) == ([], 2)
    shared = [both[0], both[0]._replace(holder=POD2)]  # one claim with two pods
    assert len(resolve(shared, [partitioned(alone)]).allocations) == 2


def test_a_profile_with_extra_characters_is_found_by_its_letters_and_digits() -> None:
    media = instance("MIG-m", "7/0", "1g.10gb+me")
    assert found(Grant("placement", "1/1g10gb-me/20/0", POD), media, instance("MIG-n", "8/0", "1g.10gb")) == "MIG-m"


def test_an_instance_is_found_by_its_number_within_the_gpu() -> None:
    assert found(Grant("instance", "1/5", POD), *PLACED) == "MIG-b"
    assert found(Grant("instance", "1/5::vgpu1", POD), *PLACED) == "MIG-b"
    assert found(Grant("instance", "1/4", POD), *PLACED).startswith("no MIG instance")
    divided = (instance("MIG-a", "3/0"), instance("MIG-b", "3/1"))
    assert found(Grant("instance", "1/3", POD), *divided).startswith("several MIG instances")
    assert found(Grant("instance", "1/3/1", POD), *divided) == "MIG-b"


def test_a_device_that_the_source_calls_shared_is_shared_even_with_one_holder() -> None:
    assert units(Grant("minor", "3", JOB, share="shard")) == [(UnitId("GPU-0"), "shard", 1.0)]
    two = units(
        Grant("minor", "3", JOB, share="mps"),
        Grant("minor", "3", JOB._replace(key=HolderKey("slurm", "8")), share="mps"),
    )
    assert two == [(UnitId("GPU-0"), "mps", 0.5)] * 2


def test_offers_are_known_if_every_offer_means_a_device() -> None:
    offers = [Grant("uuid", "GPU-0::0", POD), Grant("uuid", "GPU-0::1", POD), Grant("uuid", "MIG-a", POD)]
    assert find_offered(offers, SNAPSHOTS) == {UnitId("GPU-0"), UnitId("GPU-2", "MIG-a")}
    assert find_offered([*offers, Grant("uuid", "GPU-9", POD)], SNAPSHOTS) is None
    assert find_offered([Grant("index", "1", POD)], SNAPSHOTS) == {UnitId("GPU-1")}
    assert find_offered([Grant("index", "1", POD)], SNAPSHOTS, incomplete="gpu 2 is lost") is None
    assert find_offered([], SNAPSHOTS) == set()


def test_a_doubted_claim_has_no_part_beside_a_certain_holder_and_its_doubt_is_reported() -> None:
    certain, claim = Grant("uuid", "GPU-0", POD), Grant("minor", "3", POD2, claim="ml/watch")
    elsewhere = Grant("minor", "2", POD2, claim="ml/watch")
    result = resolve([claim, certain, elsewhere], SNAPSHOTS)
    shown = {(a.unit.uuid, a.holder.pod): (a.share_ratio, bool(a.contradiction)) for a, _ in result.allocations}
    assert shown == {("GPU-0", "a"): (1.0, False), ("GPU-1", "b"): (1.0, True)}
    assert {grant for grant, _ in result.doubted} == {claim, elsewhere}
    alone = resolve([claim, certain], SNAPSHOTS)
    assert [grant for grant, _ in alone.doubted] == [claim], (
        "the log names the claim, although it has no part of any unit"
    )
