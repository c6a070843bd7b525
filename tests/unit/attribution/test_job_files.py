"""Files of a prolog in three layouts. They are read only if no other user could have written them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.full_disk import size_limited

import gpu_exporter
from gpu_exporter.agent.attribution.slurm.on_node.job_files import FILES_MAX, READ_MAX, read_ended, read_job_files
from gpu_exporter.agent.attribution.source import SourceError

SCRIPTS = Path(gpu_exporter.__file__).parent / "contrib" / "slurm"
MIG = "MIG-3d7a1c2b-5e6f-5a0b-9c8d-112233445566"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "jobs"
    directory.mkdir(mode=0o755)
    return directory


def put(place: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (place / name).write_text(text, "utf-8")
        (place / name).chmod(0o644)


def read(place: Path) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    filed = read_job_files(place)
    assert filed.problem == ""
    return {job: (file.indexes, file.uuids) for job, file in filed.jobs.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"42": "gpus=0,3\nvisible=0,3\n"}, {"42": ((0, 3), ())}),
        ({"42": "gpus=0-2\nvisible=\n"}, {"42": ((0, 1, 2), ())}),
        ({"42": f"gpus=4\nvisible={MIG}\n", "43": "gpus=\nvisible=\n"}, {"42": ((4,), (MIG,)), "43": ((), ())}),
        ({"42": "gpus=1,2\nvisible=GPU-a,GPU-b\n"}, {"42": ((1, 2), ("GPU-a", "GPU-b"))}),
        # /run/gpustat: one file for each GPU or instance, by number and by UUID
        ({"GPU-a": "42 1000\n", "0": "42 1000\n", "GPU-b": "42 1000", "2.1": "43 7"}, {"42": ((), ("GPU-a", "GPU-b")), "43": ((), ())}),
        ({MIG: "42 1000\n"}, {"42": ((), (MIG,))}),
        # dcgm-exporter: one job id a line; a repeated id counts once, an empty file is a free GPU
        ({"0": "42\n42\n", "1": "", "2.3": "42\n43\n"}, {"42": ((), ()), "43": ((), ())}),
        ({".42.17": "gpus=", "42": "gpus=1\nvisible=\n"}, {"42": ((1,), ())}),  # a file that is being written
        ({}, {}),
    ],
)  # fmt: skip
def test_all_three_layouts_of_job_files_are_read(place: Path, files: Mapping[str, str], expected: object) -> None:
    put(place, files)
    assert read(place) == expected


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("42", "gpus=3-1\nvisible=\n", "'3-1' is descending, or the list exceeds"),
        ("42", "gpus=0;reboot\nvisible=\n", "is not a range of numbers"),
        ("42", "gpus=0-999999\n", "is descending, or the list exceeds"),
        ("readme.txt", "42\n", "its name is neither a GPU nor a job id"),
        ("0", "alice\n", "'alice' is not a job id"),
        ("0", "-3\n", "'-3' is not a job id"),
        ("42", "gpus=" + "1," * READ_MAX, f"longer than {READ_MAX} bytes"),
        ("42", "gpus=é\n", "ordinal not in range"),
        ("42", "gpus=0,1", "its last line is incomplete"),
        ("4711", "", "it is empty"),
        ("64", "", "it is empty"),
    ],
)
def test_a_file_that_is_not_understood_is_named_and_affects_no_other_job(
    place: Path, name: str, text: str, why: str
) -> None:
    put(place, {"7": "gpus=1\nvisible=\n", name: text})
    filed = read_job_files(place)
    assert filed.jobs["7"].indexes == (1,)
    assert filed.problem.startswith(f"{place}/{name}: ")
    assert why in filed.problem


def test_only_regular_files_are_opened(place: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("gpus=1\n")
    (place / "42").symlink_to(tmp_path / "secret")
    assert "42: " in read_job_files(place).problem
    (place / "42").unlink()
    os.mkfifo(place / "42", 0o644)
    assert "not a regular file" in read_job_files(place).problem
    (place / "42").unlink()
    (place / "42").mkdir()
    assert "not a regular file" in read_job_files(place).problem


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_other_users_may_write_to_is_ignored(place: Path, mode: int) -> None:
    put(place, {"42": "gpus=0\n"})
    place.chmod(mode)
    with pytest.raises(SourceError, match="other users can write to it"):
        read_job_files(place)


def test_a_file_that_other_users_may_write_to_is_ignored(place: Path) -> None:
    put(place, {"42": "gpus=0\n"})
    (place / "42").chmod(0o666)
    filed = read_job_files(place)
    assert (filed.jobs, "other users can write to it" in filed.problem) == ({}, True)


@pytest.mark.parametrize(("owner", "us", "believed"), [(0, 1000, True), (1000, 1000, True), (2000, 1000, False)])
def test_files_must_belong_to_root_or_the_reading_user(
    place: Path, monkeypatch: pytest.MonkeyPatch, owner: int, us: int, believed: bool
) -> None:
    put(place, {"42": "gpus=0\n"})
    real = os.fstat

    def status(handle: int) -> os.stat_result:
        fields = list(real(handle))
        fields[4] = owner  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", status)
    monkeypatch.setattr(os, "geteuid", lambda: us)
    if believed:
        assert read(place).keys() == {"42"}
    else:
        with pytest.raises(SourceError, match="other users can write to it"):
            read_job_files(place)


def test_a_job_is_as_old_as_its_newest_file(place: Path) -> None:
    put(place, {"GPU-a": "42 7", "GPU-b": "42 7", "43": "gpus=0\n"})
    for name, when in {"GPU-a": 500, "GPU-b": 400, "43": 300}.items():
        os.utime(place / name, (when, when))
    assert {job: file.written_wall for job, file in read_job_files(place).jobs.items()} == {"42": 500.0, "43": 300.0}


def test_a_missing_directory_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_job_files(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="Not a directory"):
        read_job_files(tmp_path / "file")


def test_more_files_than_a_prolog_makes_are_refused(place: Path) -> None:
    put(place, {str(number): "gpus=0\n" for number in range(1, FILES_MAX + 2)})
    with pytest.raises(SourceError, match="but a prolog writes at most"):
        read_job_files(place)


@given(name=st.text(min_size=1, max_size=20), text=st.text(max_size=80))
def test_any_file_gives_a_job_or_a_problem(tmp_path_factory: pytest.TempPathFactory, name: str, text: str) -> None:
    place = tmp_path_factory.mktemp("jobs")
    place.chmod(0o755)
    try:
        path = place / name
        if path.parent != place or name in (".", ".."):
            return
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    except (OSError, ValueError):  # not a valid name of a file
        return
    path.chmod(0o644)
    filed = read_job_files(place)
    assert all(job.isascii() and job.isdigit() for job in filed.jobs)


@pytest.fixture(params=["dash", "bash"])
def shell(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)


def run(shell: str, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as a slurmd with UMask=0002 does, with its own small environment."""
    command = [shell, *(["--posix"] if shell == "bash" else []), str(SCRIPTS / script)]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
        restore_signals=False,
        umask=0o002,
    )


def test_the_content_of_the_prologs_file_is_read_until_the_epilog_removes_it(shell: str, tmp_path: Path) -> None:
    place = tmp_path / "run" / "jobs"
    common = {"GPU_EXPORTER_JOB_FILES": str(place), "SLURM_JOB_ID": "42"}
    done = run(shell, "prolog.sh", **common, SLURM_JOB_GPUS="1,2", CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read(place) == {"42": ((1, 2), ("GPU-a", "GPU-b"))}
    assert oct(place.stat().st_mode & 0o777) == "0o755"
    assert [path.name for path in place.iterdir()] == ["42"]
    run(shell, "prolog.sh", **common | {"SLURM_JOB_ID": "43"}, SLURM_SHARDS_ON_NODE="2")
    run(shell, "prolog.sh", **common | {"SLURM_JOB_ID": "44"})  # a job without a GPU
    assert read(place).keys() == {"42", "43"}
    done = run(shell, "epilog.sh", **common)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read(place).keys() == {"43"}


def test_the_epilog_keeps_the_last_256_files_whatever_their_job_ids_are(shell: str, tmp_path: Path) -> None:
    common = {"GPU_EXPORTER_JOB_FILES": str(tmp_path)}
    kept = tmp_path / ".ended"
    kept.mkdir()
    (kept / "7").touch()  # of an earlier version: it stays
    for number in range(255):
        (kept / f"{1_999_999_000 + number}.{9000 - number}").touch()
    for job in ("5", "261", "517"):  # 256 ids apart
        (tmp_path / job).write_text(f"job={job}\ngpus=0\nvisible=0\n")
        assert run(shell, "epilog.sh", **common, SLURM_JOB_ID=job).returncode == 0
    names = sorted(path.name for path in kept.iterdir())
    assert (len(names), names[0]) == (257, "1999999002.8998")
    assert names[-4:] == ["1999999255.5", "1999999256.261", "1999999257.517", "7"]
    assert [(job.job_id, job.number) for job in sorted(read_ended(tmp_path, {}).jobs)] == [
        ("261", 1_999_999_256), ("5", 1_999_999_255), ("517", 1_999_999_257)
    ]  # fmt: skip


def test_epilogs_that_run_at_the_same_time_keep_every_file(shell: str, tmp_path: Path) -> None:
    for job in range(1, 13):
        (tmp_path / str(job)).write_text(f"job={job}\ngpus=0\nvisible=0\n")
    with ThreadPoolExecutor(12) as pool:
        common = {"GPU_EXPORTER_JOB_FILES": str(tmp_path)}
        done = list(pool.map(lambda job: run(shell, "epilog.sh", **common, SLURM_JOB_ID=str(job)), range(1, 13)))
    assert [each.returncode for each in done] == [0] * 12
    found = read_ended(tmp_path, {}).jobs
    assert sorted(int(job.job_id) for job in found) == list(range(1, 13))


def test_the_prolog_writes_whether_slurm_reports_mps(shell: str, tmp_path: Path) -> None:
    common = {"GPU_EXPORTER_JOB_FILES": str(tmp_path), "SLURM_JOB_GPUS": "0"}
    run(shell, "prolog.sh", **common, SLURM_JOB_ID="64")
    run(shell, "prolog.sh", **common, SLURM_JOB_ID="65", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="0")
    put(tmp_path, {"66": "gpus=0\nvisible=0\n", "67": "gpus=0\nmps=maybe\n"})
    files = read_job_files(tmp_path).jobs
    assert {job: file.mps for job, file in files.items()} == {"64": False, "65": True, "66": None, "67": None}


def test_what_prolog_or_epilog_could_write_only_in_part_has_no_name(shell: str, tmp_path: Path) -> None:
    """The disk is full until the prolog asks for the time; then there is room again."""
    place = tmp_path / "jobs"
    common = {"GPU_EXPORTER_JOB_FILES": str(place), "SLURM_JOB_ID": "42", "SLURM_JOB_GPUS": "0,1"}
    date = tmp_path / "date"
    date.write_text("#!/bin/sh\nprlimit --pid $PPID --fsize=unlimited:\necho 1700000000\n")
    date.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    with size_limited(len("job=42\ngpus=0")):
        assert run(shell, "prolog.sh", **common, PATH=path).returncode == 0
    assert list(place.iterdir()) == []
    assert run(shell, "prolog.sh", **common).returncode == 0
    with size_limited((place / "42").stat().st_size + len("end=17")):
        assert run(shell, "epilog.sh", **common).returncode == 0
    assert [path.name for path in place.rglob("*")] == [".ended"]


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "../../etc/passwd"},
        {"SLURM_JOB_ID": "4 2"},
        {"SLURM_JOB_ID": "42", "GPU_EXPORTER_JOB_FILES": "/proc/nowhere/jobs"},
        {"SLURM_JOB_ID": "42", "GPU_EXPORTER_JOB_FILES": "/dev/null"},
    ],
)
def test_no_fault_of_prolog_or_epilog_fails_a_job(
    shell: str, script: str, variables: dict[str, str], tmp_path: Path
) -> None:
    place = {"GPU_EXPORTER_JOB_FILES": str(tmp_path / "jobs"), "SLURM_JOB_GPUS": "0"}
    done = run(shell, script, **place | variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "jobs").exists() or list((tmp_path / "jobs").iterdir()) == []
