"""The flags of the exporter on a node: of the daemon, of `--once` and of `holders`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.cli.arguments import checked, duration, file_mode
from gpu_exporter.cli.parser import Parser, add_general, add_resources, add_web_config
from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES

if TYPE_CHECKING:
    from gpu_exporter.common.address import Address

DEFAULT_PORT = ":9836"
DEFAULT_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEFAULT_LOGS = "/var/log/pods"
DEFAULT_STATE = "/var/lib/gpu-exporter"


def add_agent_flags(parser: Parser) -> None:
    """Adds the flags for GPUs, holders and paths, which the daemon, `--once` and `holders` share."""
    table = "\n".join(f"  {name:16} {'on ' if on else 'off'}  {what}" for name, (on, what) in COLLECTORS.items())
    parser.section("collectors", f"--[no-]collector.NAME:\n{table}")
    for name, (on, _) in COLLECTORS.items():
        dest = f"collector_{name}"
        parser.table(f"--collector.{name}", dest=dest, action=argparse.BooleanOptionalAction, default=on)
    parser.flag(
        "--collector.xid.kmsg",
        dest="xid_kmsg",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also read XIDs and SXids from the kernel log; needs CAP_SYSLOG",
    )
    _add_pod_sources(parser)
    _add_slurm_sources(parser)
    parser.section("devices and paths")
    parser.flag("--devices.scenario", dest="scenario", type=Path, help="simulate the node of this file")
    parser.flag(
        "--devices.replay",
        dest="replay",
        action="append",
        at_commas=True,
        type=Path,
        metavar="FILE",
        help="replay a log of nvidia-smi or a recording; can be repeated",
        more="One log for each GPU, or one file of `gpu-exporter record` for the node.",
    )
    parser.flag(
        "--state.directory",
        default=DEFAULT_STATE,
        metavar="DIR",
        help=f"directory that keeps counters across restarts, '' for none (default {DEFAULT_STATE})",
    )
    for name, dest, default, what in (
        ("sysfs", "sysfs", "/sys", "the kernel's list of the PCI bus"),
        ("procfs", "procfs", "/proc", "the host's processes"),
        ("cgroup", "cgroup", "/sys/fs/cgroup", "the host's cgroups"),
        ("kmsg", "kmsg", "/dev/kmsg", "the kernel log"),
    ):
        parser.flag(
            f"--path.{name}",
            dest=dest,
            type=Path,
            default=Path(default),
            metavar="PATH",
            help=f"{what} (default {default})",
        )
    add_general(parser)


def _add_pod_sources(parser: Parser) -> None:
    parser.section("holders of GPUs")
    parser.flag(
        "--attribution.kubelet",
        dest="kubelet",
        action=argparse.BooleanOptionalAction,
        help="ask the kubelet (default: if it has a socket)",
    )
    parser.flag(
        "--attribution.kubelet.socket",
        dest="kubelet_socket",
        type=Path,
        default=Path(DEFAULT_SOCKET),
        help=f"socket of the kubelet's PodResources API (default {DEFAULT_SOCKET})",
    )
    parser.flag(
        "--attribution.kubelet.logs",
        dest="kubelet_logs",
        type=Path,
        default=Path(DEFAULT_LOGS),
        metavar="DIR",
        help=f"log directories of the pods (default {DEFAULT_LOGS})",
    )
    add_resources(parser)
    parser.flag(
        "--attribution.monitor",
        dest="monitors",
        action="append",
        at_commas=True,
        metavar="NS/REGEX",
        help="pods that watch GPUs without using them; can be repeated",
        more="REGEX matches names of pods with adminAccess claims. NVIDIA's GPU operator needs no entry.",
    )
    parser.flag(
        "--attribution.reservation",
        dest="reservations",
        action="append",
        at_commas=True,
        metavar="NAMESPACE",
        help="namespace whose pods only reserve GPUs; can be repeated",
        more=f"Tenants must not be able to create pods in it. {' and '.join(RESERVATION_NAMESPACES)} need no entry.",
    )
    parser.flag(
        "--attribution.claims",
        dest="claims",
        type=Path,
        metavar="DIR",
        help="directory of the DRA driver's kubelet plugin (default: none)",
        more="Its checkpoint shows claims with adminAccess, e.g. in /var/lib/kubelet/plugins/gpu.nvidia.com.",
    )
    parser.flag(
        "--attribution.pod-uid",
        dest="pod_uid",
        default="",
        metavar="UID",
        help="UID of the exporter's own pod (default: from /proc/self/cgroup)",
    )
    parser.flag(
        "--attribution.process",
        dest="process",
        action=argparse.BooleanOptionalAction,
        help="compare holders with processes (default: if /proc is the host's)",
        more="If a process contradicts the scheduler, the GPU's holder is unknown, never idle.",
    )
    parser.flag("--attribution.static", dest="static", type=Path, help="YAML file that lists the holders of GPUs")


def _add_slurm_sources(parser: Parser) -> None:
    parser.flag(
        "--attribution.slurm",
        dest="slurm",
        action=argparse.BooleanOptionalAction,
        help="ask Slurm (default: if slurm.conf or slurmd is here)",
    )
    parser.flag(
        "--attribution.slurm.node",
        dest="slurm_node",
        default="",
        metavar="NODENAME",
        help="NodeName of this node (default: the short host name)",
    )
    parser.flag(
        "--attribution.slurm.gres-conf",
        dest="slurm_gres_conf",
        type=Path,
        help="gres.conf as slurmd reads it (default: beside slurm.conf)",
        more="With configless Slurm, give slurmd's own copy.",
    )
    parser.flag(
        "--attribution.slurm.job-files",
        dest="slurm_job_files",
        type=Path,
        metavar="DIR",
        help="files of the prolog (default: /run/gpu-exporter/jobs if that directory exists)",
    )
    parser.address(
        "--attribution.slurm.collected",
        _parse_collected,
        "",
        dest="slurm_collected",
        metavar="PLACE",
        help="directory or URL of a slurm-collector, which this node asks instead of slurmctld",
    )


def _parse_collected(text: str) -> Address | Path | None:
    """Parses the address or the directory of a Slurm collector; None for an empty text. Raises ValueError."""
    if "://" in text or ("@" in text and not text.startswith((".", "/"))):  # a password is never shown as a directory
        from gpu_exporter.common.address import parse_address

        return parse_address(text)
    return Path(text) if text else None


def add_form_flags(parser: Parser) -> None:
    """Adds the flags for printing one reading. They request an action, so they have no environment variables."""
    forms = ("prometheus", "openmetrics", "json", "table", "holders")
    parser.flag("--once", action="store_true", is_verb=True, help="print one reading and exit")
    parser.flag(
        "--format",
        choices=forms,
        default="prometheus",
        is_verb=True,
        metavar="FORM",
        help=f"{forms[0]} (default), {', '.join(forms[1:])}",
    )
    parser.flag(
        "--check",
        type=checked("gpu_exporter.agent.exposition.checks", "parse_checks"),
        metavar="CHECKS",
        is_verb=True,
        help="failures that set the exit code: all (default), devices, or a list",
        more="devices, and a list of [checks](slurm.md#health-check) such as lost,xid, ignore sources of holders.",
    )


def add_waiting_flags(parser: Parser) -> None:
    """Adds the flags for the output file of a reading, and for its time limit."""
    parser.flag("--output", type=Path, is_verb=True, help="write to this file (atomically)")
    parser.flag(
        "--timeout",
        type=duration,
        default="10s",
        is_verb=True,
        help="longest wait for driver and sources (default 10s)",
    )


def add_daemon_flags(parser: Parser) -> None:
    """Adds the flags that only the daemon has: for its server, its socket, its textfile, and a new driver."""
    parser.section("serving")
    parser.flag(
        "--web.listen-address",
        dest="address",
        default=DEFAULT_PORT,
        metavar="[HOST]:PORT",
        help=f"address of the server (default {DEFAULT_PORT})",
    )
    add_web_config(parser)
    parser.flag(
        "--web.telemetry-path",
        dest="telemetry_path",
        default="/metrics",
        metavar="PATH",
        help="path of the metrics (default /metrics)",
    )
    parser.flag(
        "--web.hosts",
        dest="hosts",
        action="append",
        at_commas=True,
        metavar="NAME",
        help="further host name of the server; can be repeated",
        more="Page and JSON answer 421 to unknown names (docs/interfaces.md).",
    )
    parser.flag(
        "--web.socket-mode",
        dest="socket_mode",
        type=file_mode,
        default="0660",
        metavar="MODE",
        help="file mode of the socket that --once asks (default 0660)",
        more="0660: the exporter's user and group; 0666: every user.",
    )
    parser.flag("--textfile.output", dest="textfile", type=Path, help="write a file for node_exporter in place of HTTP")
    parser.flag(
        "--textfile.interval",
        type=duration,
        default="60s",
        help="time between two writes of that file (default 60s)",
        more="At most 60s.",
    )
    parser.flag(
        "--driver.changed",
        choices=("auto", "exit", "restart"),
        metavar="WHAT",
        default="auto",
        help="what to do when the driver is replaced: exit, restart or auto (default)",
        more="exit: with status 5. auto: exit in a container, otherwise restart.",
    )
