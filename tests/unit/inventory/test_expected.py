"""Expected GPUs over restarts, replacements and reboots."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_exporter.agent.inventory.expected import ExpectedDevice, ExpectedDevices, UnusableList, forget

A = ExpectedDevice("GPU-a", "0000:10:00.0", 0, "H100")
B = ExpectedDevice("GPU-b", "0000:11:00.0", 1, "H100")
C = ExpectedDevice("GPU-c", "0000:11:00.0", 1, "H100")


def seen(directory: Path, boot: str, *devices: ExpectedDevice) -> ExpectedDevices:
    """The list of a new process to which these GPUs answer."""
    book = ExpectedDevices(directory, boot)
    book.load()
    if book.note(devices):
        book.save()
    return book


def test_a_gpu_remains_expected_after_a_restart(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    assert set(seen(tmp_path, "boot-1", A).devices) == {"GPU-a", "GPU-b"}


def test_a_new_gpu_at_the_same_address_replaces_the_old_gpu(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    assert set(seen(tmp_path, "boot-1", A, C).devices) == {"GPU-a", "GPU-c"}


def test_a_renumbered_bus_replaces_no_expected_gpu(tmp_path: Path) -> None:
    """One GPU died, and the next GPU got its address."""
    moved_up = B._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    seen(tmp_path, "boot-1", A, B, moved_up)
    book = seen(tmp_path, "boot-2", A, moved_up._replace(pci_bus_id=B.pci_bus_id))
    assert set(book.devices) == {"GPU-a", "GPU-b", "GPU-d"}


def test_a_reboot_with_as_many_gpus_forgets_the_others(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    moved = B._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    assert set(seen(tmp_path, "boot-2", A, moved).devices) == {"GPU-a", "GPU-d"}


def test_a_reboot_with_fewer_gpus_keeps_the_missing_gpu_expected(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    book = seen(tmp_path, "boot-2", A)
    assert set(book.devices) == {"GPU-a", "GPU-b"}
    assert set(seen(tmp_path, "boot-2", A).devices) == {"GPU-a", "GPU-b"}
    moved = B._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    assert book.note([A, moved])  # it answers late, in another slot
    assert set(book.devices) == {"GPU-a", "GPU-d"}


def test_a_reboot_in_which_no_gpu_answers_forgets_no_gpu(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    assert set(seen(tmp_path, "boot-2").devices) == {"GPU-a", "GPU-b"}


def test_forget_reaches_a_running_exporter(tmp_path: Path) -> None:
    book = seen(tmp_path, "boot-1", A, B)
    assert not forget(tmp_path, "GPU-x")
    assert forget(tmp_path, "GPU-b")
    book.load()
    assert set(book.devices) == {"GPU-a"}
    assert set(seen(tmp_path, "boot-1", A).devices) == {"GPU-a"}


def test_a_damaged_list_file_counts_as_missing_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen(tmp_path, "boot-1", A, B)
    half = (
        '{"version": 1, "boot_id": "x", "devices": [{"uuid": "\\ud83d", "pci_bus_id": "", "position": 0, "name": ""}]}'
    )
    for text in (
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 9}',
        '{"version": 1, "boot_id": "x", "devices": [{"uuid": 1}]}',
        '{"version": 1, "boot_id": "x", "devices": 7}',
        half,
    ):
        (tmp_path / "devices.json").write_text(text, encoding="utf-8")
        caplog.clear()
        book = ExpectedDevices(tmp_path, "boot-1")
        book.load()
        book.load()
        assert book.devices == {}
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{tmp_path / 'devices.json'}: damaged (")
        assert record.getMessage().endswith("; a GPU that is missing at this start is not reported")
        with pytest.raises(UnusableList, match="damaged"):
            forget(tmp_path, "GPU-a")


def test_a_list_that_is_damaged_while_the_exporter_runs_changes_nothing_until_it_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = seen(tmp_path, "boot-1", A, B)
    (tmp_path / "devices.json").write_text("{", encoding="utf-8")
    book.load()
    assert set(book.devices) == {"GPU-a", "GPU-b"}
    assert "the exporter continues with the list that it read before" in caplog.text
    book.save()
    assert forget(tmp_path, "GPU-b")
    book.load()
    assert set(book.devices) == {"GPU-a"}


def test_a_list_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    directory = tmp_path / "full"
    book = ExpectedDevices(directory, "boot-1")
    for _ in range(2):
        assert book.note([A])
        with pytest.raises(FileNotFoundError):
            book.save()
    directory.mkdir()
    assert book.note([A])
    book.save()
    assert not book.note([A])
    assert set(seen(directory, "boot-1").devices) == {"GPU-a"}


def test_without_a_directory_the_list_is_kept_in_memory() -> None:
    book = ExpectedDevices(None, "boot-1")
    book.load()
    assert book.note([A, B])
    book.save()
    assert book.note([A]) is False
    assert set(book.devices) == {"GPU-a", "GPU-b"}


def test_without_a_reboot_a_gpu_at_a_new_address_removes_no_expected_gpu(tmp_path: Path) -> None:
    elsewhere = B._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    expected = {"GPU-a", "GPU-b", "GPU-d"}
    seen(tmp_path, "boot-1", A, B)
    assert set(seen(tmp_path, "boot-1", A, elsewhere).devices) == expected
    forget(tmp_path, "GPU-d")
    assert set(seen(tmp_path, "boot-1", A, elsewhere).devices) == expected
    book = seen(tmp_path, "boot-2", A, B, elsewhere)
    book.note([A, B])  # one GPU was lost since the reboot
    book.note([A, B, C._replace(uuid="GPU-e", pci_bus_id="0000:13:00.0")])
    assert set(book.devices) == {*expected, "GPU-e"}


def test_a_reboot_with_one_other_gpu_forgets_the_old_gpu_and_is_remembered(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A)
    moved = A._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    assert set(seen(tmp_path, "boot-2", moved).devices) == {"GPU-d"}
    book = ExpectedDevices(tmp_path, "boot-3")
    book.load()
    assert book.note([moved])  # only the boot has changed; the next process must know it
    book.save()
    assert not book.note([moved])


def test_a_list_that_equals_its_file_is_not_written(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A, B)
    book = ExpectedDevices(tmp_path, "boot-1")
    book.load()
    assert not book.note([A, B])


def test_reading_the_file_again_keeps_a_gpu_that_could_not_be_saved(tmp_path: Path) -> None:
    book = seen(tmp_path, "boot-1", A)
    late = B._replace(uuid="GPU-d", pci_bus_id="0000:12:00.0")
    for _ in range(2):
        book.note([A, late])  # and the disk is full
        book.load()
        assert set(book.devices) == {"GPU-a", "GPU-d"}
    again = ExpectedDevices(tmp_path, "boot-1")
    again.load()
    again.note([A, late])
    again.load()
    assert set(again.devices) == {"GPU-a", "GPU-d"}


def test_the_most_links_that_were_up_are_kept_until_the_gpu_is_forgotten(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A._replace(links=18), B)
    for boot in ("boot-1", "boot-2"):
        for links in (0, 17):
            book = seen(tmp_path, boot, A._replace(links=links), B)
            assert [device.links for device in book.devices.values()] == [18, 0]
    assert forget(tmp_path, A.uuid)
    assert [device.links for device in seen(tmp_path, "boot-2", A._replace(links=4), B).devices.values()] == [0, 4]


def test_a_list_without_links_is_read_and_one_with_absurd_links_is_damaged(tmp_path: Path) -> None:
    seen(tmp_path, "boot-1", A)
    path = tmp_path / "devices.json"
    text = path.read_text("utf-8")
    path.write_text(text.replace(',\n   "links": 0', ""), encoding="utf-8")
    assert "links" not in path.read_text("utf-8")
    assert seen(tmp_path, "boot-1").devices == {A.uuid: A}
    path.write_text(text.replace('"links": 0', '"links": 0, "of_a_newer_release": []'), encoding="utf-8")
    assert seen(tmp_path, "boot-1").devices == {A.uuid: A}
    for absurd in ("-1", "1000000", "true", "null"):
        path.write_text(text.replace('"links": 0', f'"links": {absurd}'), encoding="utf-8")
        assert seen(tmp_path, "boot-1").devices == {}
