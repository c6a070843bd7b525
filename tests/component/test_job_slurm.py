"""`gpu-exporter job` on a real cluster with slurmdbd, a real Prometheus, and the shipped prolog, epilog and comments."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.exits import Exit
from tests.component.slurm_host import CONTRIB, FLAGS, PROLOG, plug, requests
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, Running, fetch, run_exporter, wait_for
from tests.testbed.servers import Prometheus
from tests.testbed.slurm import GPUS, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
# slurmctld runs in a chroot without gpu-exporter. Its mails go to a file, and have the question in place of the answer.
MAIL = (CONTRIB / "mail.sh").read_text("utf-8").replace("timeout 30 gpu-exporter", "echo gpu-exporter")
LAYOUT = Layout(
    files={
        **{name: text.replace("/run/gpu-exporter/jobs", "{root}/jobs") for name, text in PROLOG.items()},
        "mail.sh": MAIL.replace("${GPU_EXPORTER_MAIL:-mail}", "{root}/etc/send.sh"),
        "send.sh": '#!/bin/sh\n{ echo "$@"; cat; } >>{root}/log/mails\n',
    },
    settings="PrologFlags=Contain\nProlog={root}/etc/prolog.sh\nEpilog={root}/etc/epilog.sh\n"
    "MailProg={root}/etc/mail.sh\n",
    recorded=True,
)
LOAD = 0.4  # of every GPU
SCENARIO = parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": LOAD}}] * GPUS})
EXACT = 0.02
MARK = "gpu-exporter.io/utilization=underused;since=2026-01-01T00:00:00Z;gpus=2"
# The real command, whose answers are kept. While a report is made, the job gets another program's text, or is requeued.
REPORT = """#!/bin/sh
echo "$2" >>{asked}
line=$({python} -m gpu_exporter "$@")
code=$?
echo "$line" | tee -a {asked}.lines
case $code,$2 in
0,{late}) sacctmgr -i modify job where jobid={late} set AdminComment=JS1:late >&2 ;;
0,{restarted}) scontrol requeuehold {restarted} >&2 ;;
esac
exit $code
"""


class Site(NamedTuple):
    """A cluster of one node, its exporter, and a Prometheus that scrapes it every second."""

    slurm: Slurm
    prometheus: Prometheus
    url: str
    state: Path
    exporter: Running

    def job(self, name: str, *flags: str, form: str = "json") -> tuple[int, str]:
        """The exit code and the output of `gpu-exporter job`."""
        place = f"--records={self.state / 'jobs'}"
        environment = {**os.environ, **self.slurm.environment}
        done = run_exporter("job", name, f"--format={form}", place, *flags, environment=environment)
        return done.returncode, done.stdout or done.stderr

    def report(self, name: str, *flags: str) -> dict[str, Any]:
        code, out = self.job(name, f"--source.prometheus={self.prometheus.url}", *flags)
        assert code in (Exit.DONE, Exit.PARTIAL), out
        return dict(json.loads(out), code=code)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Stop the exporter for some time, which otherwise asks Slurm at any moment."""
        self.exporter.process.send_signal(signal.SIGSTOP)
        children = psutil.Process(self.exporter.process.pid).children
        wait_for(lambda: all(each.status() == psutil.STATUS_ZOMBIE for each in children()), "its commands to end")
        try:
            yield
        finally:
            self.exporter.process.send_signal(signal.SIGCONT)

    def submit(self, seconds: int, *flags: str) -> str:
        script = self.slurm.root / f"sleep-{seconds}.sh"
        script.write_text(f"#!/bin/sh\nsleep {seconds}\n", encoding="utf-8")
        script.chmod(0o755)
        return self.slurm.submit_script(script, "-n1", *flags)

    def record(self, job: str) -> list[tuple[str, float]]:
        """Each run in Slurm's record: its raw id, and its GPU-seconds."""
        fields = "JobIDRaw,ElapsedRaw,AllocTRES"
        rows = self.slurm.run("sacct", "-X", "-D", "-P", "-n", "-j", job, f"--format={fields}").split()
        parts = [row.split("|") for row in rows]
        return sorted((raw, int(elapsed) * float(tres.partition("gres/gpu=")[2][0])) for raw, elapsed, tres in parts)


@pytest.fixture
def site(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> Iterator[Site]:
    state = tmp_path / "state"
    with start_slurm(processes, chroot_of("24.11"), LAYOUT) as slurm:
        own = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
        (slurm.root / "jobs").mkdir()
        plug(nvml_table, range(GPUS))
        feeder = ScenarioFeeder(SCENARIO, nvml_table)
        feeder.start()
        flags = (*FLAGS, f"--attribution.slurm.job-files={slurm.root / 'jobs'}", f"--state.directory={state}")
        exporter, url = processes.start_exporter(*flags, environment={**nvml_environment, **own})
        prometheus = Prometheus(processes, tmp_path / "prometheus", {"n0": url.removeprefix("http://")})
        complete = 'gpu_exporter_attribution_complete{source="slurm"} 1'
        wait_for(lambda: complete in (fetch(f"{url}/metrics") or ""), "Slurm")
        try:
            yield Site(slurm, prometheus, url, state, exporter)
        finally:
            feeder.stop()


def test_a_report_equals_slurms_record_and_the_load_of_the_gpus(site: Site) -> None:
    mails = ("--mail-type=BEGIN,END", "--mail-user=erin@example.org")
    long = site.submit(40, "--gres=gpu:2", "--time=10", *mails)
    array = site.submit(3, "--gres=gpu:1", "--array=1-4", *mails)
    harm = site.slurm.root / "harm"
    again = site.submit(6, "--gres=gpu:1", "--requeue", f"--job-name=a\";'$(touch {harm})|; touch {harm}; x=b")
    wait_for(lambda: again in site.slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").split(), "a job to requeue")

    def is_shown() -> dict[str, Any] | None:
        found = site.report(long)
        return found if found["known_gpu_seconds"] > 10.0 else None

    running = wait_for(is_shown, "readings of the running job", each_s=1.0)
    assert running["runs"][0]["slurm"]["state"] == "RUNNING"
    assert running["runs"][0]["slurm"]["limit_s"] == 600.0
    _, text = site.job(long, f"--source.exporter={site.url}", form="text")
    assert "of 10m, 9m" in text and "not searched for" in text
    site.slurm.run("scontrol", "update", f"JobId={long}", f"AdminComment={MARK}")
    site.slurm.run("scontrol", "requeue", again)
    wait_for(lambda: not site.slurm.run("squeue", "-h").strip(), "the end of all jobs", each_s=0.5)
    file = site.state / "jobs" / "65534.jsonl"
    wait_for(lambda: file.read_text().count("\n") == 7 or None, "the records of all runs", each_s=0.5)

    for job, runs in ((long, 1), (array, 4), (again, 2)):
        record, report = site.record(job), site.report(job)
        assert len(record) == runs
        assert sorted((run["job_id"], run["held_gpu_seconds"]) for run in report["runs"]) == record
        assert report["code"] == Exit.DONE
        seconds = sum(run["gpus"] for run in report["runs"])  # dates are whole seconds
        assert report["known_gpu_seconds"] == pytest.approx(report["held_gpu_seconds"], rel=EXACT, abs=seconds)
        assert report["utilization_mean_ratio"] == pytest.approx(LOAD, rel=EXACT)
        assert report["energy_joules"] > 0.0
        # Without the records of the node, the time after the last scrape is unknown, and never idle.
        scraped = site.report(job, "--records=/nonexistent")
        assert scraped["held_gpu_seconds"] == report["held_gpu_seconds"]
        assert scraped["idle_gpu_seconds"] <= report["idle_gpu_seconds"]
        assert scraped["known_gpu_seconds"] <= report["known_gpu_seconds"]
        missed = scraped["held_gpu_seconds"] - scraped["known_gpu_seconds"]
        assert scraped["unknown_gpu_seconds"] == pytest.approx(missed)
        # And on the node itself, Prometheus is not needed.
        code, out = site.job(job)
        assert code == Exit.DONE
        assert json.loads(out)["known_gpu_seconds"] == pytest.approx(report["known_gpu_seconds"])
    assert site.job("99999")[0] == Exit.NO_DATA
    check_comments(site, long, array, again)
    assert not harm.exists()
    check_private(site, long)
    lines = (site.slurm.root / "log" / "mails").read_text("utf-8").splitlines()
    asked = [line for line in lines if line.startswith("gpu-exporter ")]
    assert sorted(asked) == sorted(f"gpu-exporter job {job} --format=line" for job in (long, array))
    assert sum("Job_id=" in line for line in lines) == 4


def test_hours_of_accounts_differ_from_slurms_record_by_suspended_time_only(site: Site) -> None:
    long = ("--requeue", "--account=phys")
    jobs = [site.submit(3, "--gres=gpu:1", "--array=1-6", "--account=chem")]
    jobs += [site.submit(16, f"--gres=gpu:{gpus}", *flags) for gpus, flags in ((1, long), (2, ("--account=phys",)))]
    requeued, suspended = jobs[1:]

    def ages() -> dict[str, int]:
        lines = site.slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%A %M").splitlines()
        return {job: int(time.rpartition(":")[2]) for job, time in map(str.split, lines)}

    wait_for(lambda: {requeued, suspended} <= ages().keys(), "both jobs of phys to run")
    site.slurm.run("scontrol", "suspend", suspended)
    wait_for(lambda: ages()[requeued] >= 12, "some time of the suspended job", each_s=0.5)
    site.slurm.run("scontrol", "requeue", requeued)
    site.slurm.run("scontrol", "resume", suspended)
    wait_for(lambda: not site.slurm.run("squeue", "-h").strip(), "the end of all jobs", each_s=0.5)
    record = [seconds for job in jobs for _, seconds in site.record(job)]
    assert len(record) == 9

    def report(form: str) -> str:
        flags = (f"--source.prometheus={site.prometheus.url}", "--since=10m", f"--format={form}")
        environment = {**os.environ, **site.slurm.environment}
        return run_exporter("report", "--against=sacct", *flags, environment=environment).stdout

    def is_counted() -> dict[str, Any] | None:
        """The comparison, once the accounts are not new; they are published as 0 for their first minute."""
        found = dict(json.loads(report("json") or '{"accounts": []}'))
        return found if sum(each["held_gpu_seconds"] for each in found["accounts"]) > sum(record) else None

    accounts = {each["account"]: each for each in wait_for(is_counted, "the hours", each_s=1.0)["accounts"]}
    assert {account: each["runs"] for account, each in accounts.items()} == {"chem": 6, "phys": 3}
    assert sum(each["sacct_gpu_seconds"] for each in accounts.values()) == sum(record)
    reasons = {account: each["reasons_gpu_seconds"] for account, each in accounts.items()}
    time = site.slurm.run("sacct", "-X", "-P", "-n", "-j", suspended, "--format=Suspended").strip()
    assert (reasons["chem"]["suspended"], reasons["phys"]["suspended"]) == (0.0, 2.0 * int(time.rpartition(":")[2]))
    assert time > "00:00:02"
    for account, each in accounts.items():
        assert sum(reasons[account].values()) == pytest.approx(each["difference_gpu_seconds"])
        assert abs(reasons[account]["rest"]) <= 0.01 * each["sacct_gpu_seconds"]
        assert reasons[account]["parts"] == reasons[account]["unseen"] == 0.0
    assert max(map(len, (text := report("text").partition("Note:")[0]).splitlines())) <= 80
    assert "suspended jobs keep their GPUs" in text


def check_comments(site: Site, marked: str, array: str, again: str) -> None:
    """An ended job's line is written once, and replaces no text. A report that failed is made again by the next run."""
    folder = site.slurm.root / "comments"
    folder.mkdir()
    asked, lines = folder / "asked", folder / "asked.lines"
    script, nowhere = folder / "comment.sh", folder / "slurm.conf"
    foreign, late, restarted, last = (f"{array}_{task}" for task in range(1, 5))
    program = folder / "gpu-exporter"
    text = REPORT.format(asked=asked, late=late, restarted=restarted, python=sys.executable)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    conf = Path(site.slurm.environment["SLURM_CONF"]).read_text("utf-8")
    nowhere.write_text(re.sub("(AccountingStoragePort)=.*", r"\1=1", conf), encoding="utf-8")
    site.slurm.run("sacctmgr", "-i", "modify", "job", "where", f"jobid={foreign}", "set", "AdminComment=JS1:none")
    running = site.slurm.submit("--gres=gpu:1")

    def write(settled_s: int = 0, url: str = site.prometheus.url, **more: str) -> tuple[int, list[str]]:
        """Runs the script. Returns its exit code, and the jobs whose report it asked for."""
        text = (CONTRIB / "comment.sh").read_text("utf-8").replace("settled=180 ", f"settled={settled_s} ")
        script.write_text(text, encoding="utf-8")
        for path in (asked, lines):
            path.write_text("", encoding="utf-8")
        flags = f"--source.prometheus={url} --records={site.state / 'jobs'}"
        path = f"{folder}:{site.slurm.environment['PATH']}"
        environment = {**site.slurm.environment, "PATH": path, "GPU_EXPORTER_JOB_FLAGS": flags, **more}
        done = subprocess.run(["sh", str(script)], env=environment, capture_output=True, check=False, timeout=300)
        return done.returncode, asked.read_text("utf-8").split()

    def read(field: str) -> dict[str, str]:
        jobs = ",".join((marked, array, again, running))
        rows = site.slurm.run("sacct", "-X", "-P", "-n", "-j", jobs, f"--format=JobID,{field}").splitlines()
        return dict(row.split("|") for row in rows)

    empty = dict.fromkeys((late, restarted, last, again, running), "")
    texts = {marked: MARK, foreign: "JS1:none", **empty}
    assert write(settled_s=900) == (0, [])  # their last scrapes may not be in Prometheus
    assert write(SLURM_CONF=str(nowhere)) == (1, [])
    with script.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert write() == (0, [])
    asked_for = sorted((again, late, restarted, last))
    code, names = write(url="http://127.0.0.1:1")
    assert (code, sorted(names)) == (0, asked_for)
    lengths = read("ElapsedRaw")
    assert (each := [int(lengths[name]) for name in names]) == sorted(each, reverse=True)
    assert read("AdminComment") == texts
    with site.quiet():
        before = requests(site.slurm)
        code, names = write()
        more = {name: count for name, count in (requests(site.slurm) - before).items() if "NODE_REG" not in name}
    assert (code, sorted(names), more) == (0, asked_for, {"REQUEST_JOB_REQUEUE": 1})
    answers = dict(zip(names, lines.read_text("utf-8").splitlines(), strict=True))
    texts |= {late: "JS1:late", **{job: answers[job] for job in (again, last)}}
    assert all(re.match(rf"job {job}: \d+% used", texts[job]) for job in (again, last))
    assert read("AdminComment") == texts
    assert set(write()[1]) <= {restarted}
    assert read("AdminComment") == texts


def check_private(site: Site, job: str) -> None:
    """A stranger sees of Slurm's record what sacct shows: all of it, or nothing with PrivateData=jobs."""
    folder = site.slurm.root / "stranger"
    folder.mkdir()
    command = folder / "sacct"
    command.write_text(f'#!/bin/sh\nSLURM_LAB_USER=daemon exec {site.slurm.root}/bin/sacct "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    stranger = site._replace(state=folder)
    stranger.slurm.environment["PATH"] = f"{folder}:{site.slurm.environment['PATH']}"
    assert stranger.job(job)[0] == Exit.PARTIAL  # known to Slurm, and measured nowhere that he may read
    with (site.slurm.root / "etc" / "slurmdbd.conf").open("a", encoding="utf-8") as conf:
        conf.write("PrivateData=jobs,usage,users\n")
    site.slurm.run("sacctmgr", "-i", "reconfigure")
    wait_for(lambda: stranger.job(job)[0] == Exit.NO_DATA, "nothing to be shown", each_s=0.5)
