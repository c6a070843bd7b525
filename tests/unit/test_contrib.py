"""Files for systemd and Slurm that sites install: the health check works as documented, and its faults fail no node."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import gpu_exporter
from gpu_exporter.agent.attribution.slurm.on_node.job_files import Filed, read_ended, read_job_files
from gpu_exporter.cli.reports.digest import build_parser

CONTRIB = Path(gpu_exporter.__file__).parent / "contrib"


def check(tmp_path: Path, status: int, drain: str = "", said: str = "") -> tuple[int, str, list[str]]:
    """Exit code and output of the health check, and the calls of scontrol, if gpu-exporter ends with `status`."""
    (tmp_path / "said").write_text(said, "utf-8")
    programs = {
        "gpu-exporter": f'echo "$*" >{tmp_path}/asked; cat {tmp_path}/said >&2; exit {status}',
        "scontrol": f'echo "$*" >>{tmp_path}/told',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(
        ["sh", str(CONTRIB / "slurm" / "health.sh")],
        env=environment | ({"GPU_EXPORTER_DRAIN": drain} if drain else {}),
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    told = tmp_path / "told"
    return done.returncode, done.stdout, told.read_text("utf-8").splitlines() if told.exists() else []


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (
            3,
            "gpu-exporter: no GPU data: the driver is gone\n"
            "gpu-exporter: failed checks: lost: the driver is gone (check the driver)\n",
            "lost: the driver is gone (check the driver)",
        ),
        (
            4,
            "gpu-exporter: warning: old\ngpu-exporter: partial: gpu 0: fell off; $(reboot) 'x'\n"
            "gpu-exporter: failed checks: lost: gpu 0: fell off; $(reboot) 'x' (reboot the node)\n",
            "lost: gpu 0: fell off; $(reboot) 'x' (reboot the node)",
        ),
        (4, "gpu-exporter: partial: gpu 3 asks for a reset\n", "not all GPUs answer"),  # of another version
        (4, "", "not all GPUs answer"),
    ],
)
def test_a_node_is_drained_with_the_gpu_and_its_fault_as_reason_if_the_site_configured_it(
    tmp_path: Path, status: int, said: str, reason: str
) -> None:
    assert check(tmp_path, status, said=said) == (0, said or "\n", [])
    assert (tmp_path / "asked").read_text() == "--once --check=devices --timeout=20s\n"
    told = [f"update NodeName=n0 State=DRAIN Reason=gpu-exporter: {reason}"]
    assert check(tmp_path, status, "yes", said) == (0, said or "\n", told)


@pytest.mark.parametrize("status", [0, 1, 2, 143])
def test_a_health_check_that_itself_fails_drains_no_node(tmp_path: Path, status: int) -> None:
    assert check(tmp_path, status, "yes") == (0, "", [])


@pytest.mark.parametrize("mode", [None, 0o644], ids=["missing", "not executable"])
def test_a_health_check_without_gpu_exporter_reports_it_and_drains_no_node(tmp_path: Path, mode: int | None) -> None:
    if mode is not None:
        (tmp_path / "gpu-exporter").touch(mode)
    done = subprocess.run(
        ["sh", str(CONTRIB / "slurm" / "health.sh")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GPU_EXPORTER_DRAIN": "yes"},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-health: cannot run gpu-exporter, so the GPUs are not checked: ")
    assert done.stdout.count("\n") == 1


def test_the_systemd_unit_has_the_documented_settings() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(CONTRIB / "systemd" / "gpu-exporter.service", "utf-8")
    service = dict(unit["Service"])
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["StateDirectory"] == "gpu-exporter"  # /var/lib/gpu-exporter, the default of --state.directory
    # The driver's devices, slurmd's sockets and the processes of other users must remain accessible.
    assert not {"PrivateDevices", "ProtectProc", "PrivateNetwork", "PrivateUsers"} & service.keys()


def test_the_timer_starts_the_digest_with_flags_that_the_command_has() -> None:
    folder = CONTRIB / "systemd"
    timer, service = configparser.RawConfigParser(strict=False), configparser.RawConfigParser(strict=False)
    for unit, name in ((timer, "timer"), (service, "service")):
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(folder / f"gpu-exporter-digest.{name}", "utf-8")
    assert dict(timer["Timer"]) == {"OnCalendar": "Mon 06:00", "Persistent": "yes"}
    program, command, *flags = service["Service"]["ExecStart"].split()
    assert (program, command, flags.pop()) == (
        "/opt/gpu-exporter/bin/gpu-exporter",
        "digest",
        "$GPU_EXPORTER_DIGEST_FLAGS",
    )
    options = build_parser().read(flags)
    assert options.output.parent == Path("/var/lib") / service["Service"]["StateDirectory"]
    assert service["Service"]["Type"] == "oneshot" and "Install" not in service, "the timer alone starts it"


def test_every_script_is_posix_and_executable() -> None:
    scripts = sorted(CONTRIB.rglob("*.sh"))
    assert [script.name for script in scripts] == ["comment.sh", "epilog.sh", "health.sh", "mail.sh", "prolog.sh"]
    for script in scripts:
        assert script.read_text("utf-8").startswith("#!/bin/sh\n")
        assert script.stat().st_mode & 0o111 == 0o111
        assert subprocess.run(["dash", "-n", str(script)], check=False).returncode == 0


def test_a_comment_is_one_line_over_no_text_whatever_the_flags_of_mails_are(tmp_path: Path) -> None:
    """job.environment may choose the whole report for mails. Comments may have any characters, and a job may get its
    comment while its report is made.
    """
    ended, folder = int(time.time()) - 600, tmp_path / "my scripts"
    rows = {"7": "", "8_1": "", "9+0": "", "10": "JS1:none", "11": "a|b", "12": "\nmine", "13": ""}
    listed = "\n".join(f"{job}|60|{ended}|cpu=1,gres/gpu=1|{text}" for job, text in rows.items())
    (tmp_path / "listed").write_text(f"sacct: a warning | of one|kind\n{listed}\n14|60|{ended}|cpu=1|\n", "utf-8")
    for job, text in {**rows, "13": "late"}.items():
        (tmp_path / job).write_text(f"{ended}|{text}\n", "utf-8")
    programs = {
        "sacct": f'for each; do case $each in --jobs=*) exec cat "{tmp_path}/${{each#--jobs=}}";; esac; done; '
        f"cat {tmp_path}/listed",
        "gpu-exporter": 'for format; do :; done; echo "job $2: $format"',
        "sacctmgr": f'echo "$#: $*" >>{tmp_path}/told',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    folder.mkdir()
    shutil.copy(CONTRIB / "slurm" / "comment.sh", folder)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GPU_EXPORTER_JOB_FLAGS": "--since=1d --format=text"}
    done = subprocess.run(["sh", str(folder / "comment.sh")], env=environment, check=False, timeout=60)
    assert done.returncode == 0
    assert sorted((tmp_path / "told").read_text("utf-8").splitlines()) == [
        f"7: -i modify job where jobid={job} set AdminComment=job {job}: --format=line" for job in ("7", "8_1", "9+0")
    ]


def run_script(name: str, tmp_path: Path, **environment: str) -> int:
    variables = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_UID": "1000",
        "SLURM_JOB_GPUS": "0",
        "GPU_EXPORTER_JOB_FILES": str(tmp_path / "jobs"),
    }
    script = CONTRIB / "slurm" / name
    return subprocess.run(["sh", str(script)], env=variables | environment, check=False, timeout=30).returncode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as slurmd is: the folder becomes the user's")
def test_the_prolog_gives_a_job_a_folder_for_its_training_and_the_epilog_removes_it(tmp_path: Path) -> None:
    training, kept = tmp_path / "training", tmp_path / "kept"
    assert run_script("prolog.sh", tmp_path) == 0
    assert not training.exists()
    assert run_script("prolog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training)) == 0
    folder = training / "42"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777, training.stat().st_uid) == (1000, 0o755, 0)
    kept.mkdir()
    (kept / "file").touch()
    (folder / "link").symlink_to(kept)
    assert run_script("epilog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training)) == 0
    assert not folder.exists() and (kept / "file").exists()
    for bad in ("relative", "", "../x"):
        assert run_script("epilog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=bad) == 0
    assert run_script("prolog.sh", tmp_path, GPU_EXPORTER_TRAINING_FILES=str(training), SLURM_JOB_UID="") == 0
    assert not folder.exists()


def test_64_prologs_and_epilogs_at_once_send_slurmctld_nothing_and_lose_no_job(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mkdir", "date", "mv", "rm"):
        (programs / name).symlink_to(shutil.which(name) or "")
    asked = tmp_path / "asked"
    for name in ("gpu-exporter", "sacct", "scontrol", "sinfo", "squeue", "srun"):
        (programs / name).write_text(f'#!/bin/sh\necho "$0" >>{asked}\n', "utf-8")
        (programs / name).chmod(0o755)
    jobs = tmp_path / "jobs"

    def run_all(script: str, ids: range) -> None:
        command = ["/bin/sh", str(CONTRIB / "slurm" / script)]
        given = {"PATH": str(programs), "SLURM_JOB_GPUS": "0,1", "GPU_EXPORTER_JOB_FILES": str(jobs)}
        started = [
            subprocess.Popen(command, env={**given, "SLURM_JOB_ID": str(job), "SLURM_JOB_USER": 128 * "u"})
            for job in ids
        ]
        assert {each.wait(60) for each in started} == {0}

    waves = [range(first, first + 64) for first in range(1, 321, 64)]
    for wave in waves:
        run_all("prolog.sh", wave)
        run_all("epilog.sh", wave)
        ended = read_ended(jobs, {})
        assert {int(each.job_id) for each in ended.jobs} >= set(wave), "all jobs of the wave"
        assert read_job_files(jobs) == Filed({})
    files = list((jobs / ".ended").iterdir())
    assert 256 <= len(files) < 256 + 64 and len(files) == len(ended.jobs)
    assert max(path.stat().st_size for path in files) < 1024
    assert not asked.exists()


@pytest.mark.parametrize(
    ("subject", "asked"),
    [
        ("Slurm Job_id=104 Name=fit Ended, Run time 00:00:05, COMPLETED, ExitCode 0", "104"),
        ("Slurm Array Summary Job_id=16_* (16) Name=fit Ended, COMPLETED, ExitCode [0-0]", "16"),
        ("Slurm Array Task Job_id=16_3 (19) Name=fit Failed, Run time 00:00:05, FAILED", "16_3"),
        ("Slurm Job_id=104 Name=fit Began, Queued time 00:00:01", ""),
        ("Slurm Array Summary Job_id=2_* (2) Name=fit Began", ""),
        ("Slurm Job_id=104 Name=Job_id=7 Ended, Run time 00:00:05", "104"),
        ("Name=Slurm Job_id=7 Ended", ""),
        ("Slurm Job_id=$(touch x) Ended", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("status", [0, 3])
def test_a_mail_of_slurm_about_the_end_of_a_job_has_its_line(
    tmp_path: Path, subject: str, asked: str, status: int
) -> None:
    """A report that fails costs the line, never the mail."""
    programs = {
        "gpu-exporter": f'echo "$*" >>{tmp_path}/asked; [ {status} = 0 ] && echo "job: 7% used"; exit {status}',
        "mail": f'{{ printf "%s|" "$@"; cat; }} >{tmp_path}/sent',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    command = ["sh", str(CONTRIB / "slurm" / "mail.sh"), "-s", subject, "erin"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command, env=environment, input="body\n", text=True, check=True, timeout=30, cwd=tmp_path)
    line = "job: 7% used\n" if asked and status == 0 else ""
    assert (tmp_path / "sent").read_text("utf-8") == f"-s|{subject}|erin|body\n{line}"
    shown = (tmp_path / "asked").read_text("utf-8") if (tmp_path / "asked").exists() else ""
    assert shown == (f"job {asked} --format=line\n" if asked else "")
    assert not (tmp_path / "x").exists()
