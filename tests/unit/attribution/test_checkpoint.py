"""The checkpoint of the DRA driver shows which claims only watch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_exporter.agent.attribution.kubelet.consumers import CHECKPOINT, Consumers
from gpu_exporter.agent.attribution.kubelet.podresources import ContainerDevices

GPU, OTHER = "gpu.nvidia.com", "gpu.example.com"
UID, OLD = (f"0000000{number}-0000-4000-8000-000000000000" for number in (1, 2))


def result(device: str = "gpu-0", admin: bool | None = None, driver: str = GPU) -> dict[str, Any]:
    return {"device": device, "driver": driver} | ({} if admin is None else {"adminAccess": admin})


def claim(*results: dict[str, Any], name: str = "watch") -> dict[str, Any]:
    return {"namespace": "ml", "name": name, "status": {"allocation": {"devices": {"results": list(results)}}}}


def entry(uid: str = UID, driver: str = GPU, name: str = "ml/watch") -> ContainerDevices:
    cdi = (f"k8s.{GPU}/claim={uid}-gpu-0",) if uid else ()
    return ContainerDevices("ml", "pod", "main", driver, ("gpu-0",), claimed=True, claim=name, cdi=cdi)


def judged(folder: Path, claims: dict[str, Any], *entries: ContainerDevices, form: str = "v2") -> list[str]:
    """The result for each entry: watches, takes (proven) or unknown."""
    (folder / CHECKPOINT).write_text(json.dumps({form: {"preparedClaims": claims}}))
    consumers = Consumers(plugin=folder)
    found = []
    for each in entries:
        (left,) = consumers.select([each]) or [None]
        found.append("watches" if left is None else "takes" if left.proven else "unknown")
    return found


@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize(("admin", "said"), [(True, "watches"), (False, "takes"), (None, "takes")])
@pytest.mark.parametrize("uid", [UID, ""])
def test_a_claim_is_found_by_its_uid_or_its_name(
    tmp_path: Path, form: str, admin: bool | None, said: str, uid: str
) -> None:
    assert judged(tmp_path, {UID: claim(result(admin=admin))}, entry(uid), form=form) == [said]


def test_a_claim_that_watches_and_takes_a_device_counts_as_taking_it(tmp_path: Path) -> None:
    for results in ((result(admin=True), result()), (result(), result(admin=True))):
        assert judged(tmp_path, {UID: claim(*results)}, entry()) == ["takes"]


def test_a_device_of_another_driver_is_another_device(tmp_path: Path) -> None:
    claims = {UID: claim(result(admin=True), result(driver=OTHER))}
    assert judged(tmp_path, claims, entry(), entry(driver=OTHER), entry(driver="")) == ["watches", "takes", "unknown"]


def test_a_deleted_claim_proves_nothing_about_a_new_claim_of_its_name(tmp_path: Path) -> None:
    """The file keeps a claim until it is unprepared. The next claim of that name has another UID."""
    claims = {OLD: claim(result(admin=True)), UID: claim(result())}
    assert judged(tmp_path, claims, entry(UID), entry(OLD)) == ["takes", "watches"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"v3": {}}', '{"v2": 1}', "\x00", '{"v2": {"preparedClaims": [1]}}']
)
def test_a_checkpoint_that_is_not_understood_proves_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / CHECKPOINT).write_text(text)
    (left,) = Consumers(plugin=tmp_path).select([entry()])
    assert not left.proven
