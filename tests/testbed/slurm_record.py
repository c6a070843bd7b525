"""slurmdbd with a MariaDB of its own: Slurm's record of every run of a job, as sacct prints it. Loopback only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.testbed.processes import Processes, free_port, wait_for

PACKAGES = ("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server")
PROGRAMS = ("mariadb-install-db", "mariadbd", "sacct", "sacctmgr", "slurmdbd")
SMALL = ("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0")


def start_slurmdbd(processes: Processes, root: Path, environment: Mapping[str, str]) -> None:
    """Start database and slurmdbd for the cluster in `root`, and name slurmdbd in its slurm.conf."""
    data = (root / "state").resolve() / "database"  # in memory
    owned = ["--no-defaults", "--user=root", f"--datadir={data}"]
    subprocess.run(
        ["mariadb-install-db", *owned, "--force"], env=environment, check=True, capture_output=True, timeout=120
    )
    port = free_port()
    first = root / "etc" / "first.sql"
    # The database too: where slurmdbd creates it, libmariadb 11.8.9 refuses each answer of the same connection.
    lines = (
        "CREATE USER 'slurm'@'localhost'",
        "GRANT ALL ON *.* TO 'slurm'@'localhost'",
        "CREATE DATABASE slurm_acct_db",
    )
    first.write_text("".join(f"{line};\n" for line in lines), encoding="utf-8")
    place = ["--skip-networking", f"--socket={root}/run/socket", f"--init-file={first}"]
    database = processes.start(["mariadbd", *owned, *place, *SMALL], environment)
    wait_for(lambda: "ready for connections" in database.log(), "the database")
    settings = {
        "AuthType": "auth/none",
        "DbdHost": "localhost",
        "DbdPort": port,
        "LogFile": root / "log" / "slurmdbd.log",
        "PidFile": root / "run" / "slurmdbd.pid",
        "SlurmUser": "slurm",
        "StorageHost": "localhost",
        "StorageType": "accounting_storage/mysql",
        "StorageUser": "slurm",
    }
    file = root / "etc" / "slurmdbd.conf"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
    file.chmod(0o600)
    shutil.chown(file, (root / "log").stat().st_uid)
    with (root / "etc" / "slurm.conf").open("a", encoding="utf-8") as conf:
        conf.write("AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n")
        conf.write(f"AccountingStoragePort={port}\nAccountingStorageTRES=gres/gpu\n")
    processes.start(["slurmdbd", "-D"], {**environment, "MYSQL_UNIX_PORT": f"{root}/run/socket"})
    add = ["sacctmgr", "-i", "add", "cluster", "lab"]

    def is_added() -> bool:
        done = subprocess.run(add, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode == 0 or "already exists" in done.stdout

    wait_for(is_added, "slurmdbd", each_s=0.5)
