"""The flags of the exporter on a node: of the daemon, of `--once` and of `holders`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.cli.arguments import duration, file_mode
from gpu_exporter.cli.parser import Parser, add_config, add_logging, add_resources, add_web_config

if TYPE_CHECKING:
    from gpu_exporter.common.address import Address

DEFAULT_PORT = ":9836"
DEFAULT_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEFAULT_LOGS = "/var/log/pods"
DEFAULT_STATE = "/var/lib/gpu-exporter"


def add_agent_flags(parser: Parser) -> None:
    """Adds the flags that the daemon, `--once` and `holders` share: where GPUs, holders and files are."""
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
        help="also read XIDs from the kernel log; needs CAP_SYSLOG",
        more="NVML has no event for some XIDs, such as 62.",
    )
    _add_pod_sources(parser)
    _add_slurm_sources(parser)
    parser.section("devices and paths")
    parser.flag("--devices.scenario", dest="scenario", type=Path, default=None, help="simulate the node of this file")
    parser.flag(
        "--devices.replay",
        dest="replay",
        action="append",
        at_commas=True,
        type=Path,
        metavar="FILE",
        help="replay a log of nvidia-smi or a recording; repeat it",
        more="One log for each GPU, or one file of `gpu-exporter record` for the node.",
    )
    parser.flag(
        "--state.directory",
        dest="state_directory",
        default=DEFAULT_STATE,
        metavar="DIR",
        help=f"where counters survive a restart, '' for none (default {DEFAULT_STATE})",
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
    parser.section("general")
    add_config(parser)
    add_logging(parser)


def _add_pod_sources(parser: Parser) -> None:
    parser.section("who holds which GPU")
    parser.flag(
        "--attribution.kubelet",
        dest="kubelet",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the kubelet (default: if it has a socket)",
    )
    parser.flag(
        "--attribution.kubelet.socket",
        dest="kubelet_socket",
        type=Path,
        default=Path(DEFAULT_SOCKET),
        help=f"socket of its PodResources API (default {DEFAULT_SOCKET})",
    )
    parser.flag(
        "--attribution.kubelet.logs",
        dest="kubelet_logs",
        type=Path,
        default=Path(DEFAULT_LOGS),
        metavar="DIR",
        help=f"log directories of the pods (default {DEFAULT_LOGS})",
        more="The kubelet's answer has no UIDs; the names of these directories have them.",
    )
    add_resources(parser)
    parser.flag(
        "--attribution.monitor",
        dest="monitors",
        action="append",
        at_commas=True,
        metavar="NS/REGEX",
        help="pods that only watch GPUs; repeat it",
        more="Pods with adminAccess claims see all GPUs: a namespace, and a regular expression for the pods' "
        "names in it. Those of NVIDIA's GPU operator are known.",
    )
    parser.flag(
        "--attribution.claims",
        dest="claims",
        type=Path,
        default=None,
        metavar="DIR",
        help="directory of the DRA driver's kubelet plugin (default: none)",
        more="Its checkpoint tells which resource claims have adminAccess, e.g. "
        "/var/lib/kubelet/plugins/gpu.nvidia.com.",
    )
    parser.flag(
        "--attribution.pod-uid",
        dest="pod_uid",
        default="",
        metavar="UID",
        help="UID of the exporter's own pod (default: from /proc/self/cgroup)",
        more="The host's cgroups tell that a pod has ended only if they show the exporter's own pod.",
    )
    parser.flag(
        "--attribution.process",
        dest="process",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare holders with processes (default: if /proc is the host's)",
        more="If a process on a GPU contradicts the scheduler, the GPU's holder becomes unknown, never idle. "
        "The default is on if --path.procfs shows the host's processes.",
    )
    parser.flag(
        "--attribution.static", dest="static", type=Path, default=None, help="YAML file that lists who holds what"
    )


def _add_slurm_sources(parser: Parser) -> None:
    parser.flag(
        "--attribution.slurm",
        dest="slurm",
        action=argparse.BooleanOptionalAction,
        default=None,
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
        default=None,
        help="gres.conf as slurmd reads it (default: beside slurm.conf)",
        more="Or slurmd's own copy, if Slurm is configless.",
    )
    parser.flag(
        "--attribution.slurm.job-files",
        dest="slurm_job_files",
        type=Path,
        default=None,
        metavar="DIR",
        help="files of the prolog (default: /run/gpu-exporter/jobs if it is there)",
        more="Files of our prolog, of jobstats (gpustat) or of dcgm-exporter (hpc-job-mapping-dir).",
    )
    parser.address(
        "--attribution.slurm.collected",
        _parse_collected,
        "",
        dest="slurm_collected",
        default=None,
        metavar="PLACE",
        help="directory or URL of a slurm-collector, in place of slurmctld",
        more="This node then never asks slurmctld.",
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
    parser.flag("--once", action="store_true", default=False, is_verb=True, help="print one reading and exit")
    parser.flag(
        "--format",
        dest="format",
        choices=forms,
        default="prometheus",
        is_verb=True,
        metavar="FORM",
        help=f"{forms[0]} (default), {', '.join(forms[1:])}",
    )
    parser.flag(
        "--check",
        dest="check",
        choices=("all", "devices"),
        metavar="WHAT",
        default="all",
        is_verb=True,
        help="failures that set the exit code: all (default) or devices",
        more="devices leaves out sources of holders, as a node's health check should.",
    )


def add_waiting_flags(parser: Parser) -> None:
    """Adds the flags for where a reading is written, and how long it may take."""
    parser.flag(
        "--output",
        dest="output",
        type=Path,
        default=None,
        is_verb=True,
        help="write to this file, by rename",
    )
    parser.flag(
        "--timeout",
        dest="timeout",
        type=duration,
        default="10s",
        is_verb=True,
        help="longest wait for driver and sources (default 10s)",
    )


def add_daemon_flags(parser: Parser) -> None:
    """Adds the flags for how the daemon publishes its data."""
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
        help="further host name of the server; repeat it",
        more="Page and JSON answer requests for addresses, names without a dot, cluster Services and this "
        "host's name; to others they answer 421, against DNS rebinding.",
    )
    parser.flag(
        "--web.socket-mode",
        dest="socket_mode",
        type=file_mode,
        default="0660",
        metavar="MODE",
        help="file mode of the socket that --once asks (default 0660)",
        more="With 0660 the exporter's user and group can read it, with 0666 every user.",
    )
    parser.flag(
        "--textfile.output",
        dest="textfile",
        type=Path,
        default=None,
        help="write a file for node_exporter in place of HTTP",
    )
    parser.flag(
        "--textfile.interval",
        dest="textfile_interval",
        type=duration,
        default="60s",
        help="time between two writes of that file (default 60s)",
        more="At most 60s: the reconciler accepts a sample until it is four intervals old.",
    )
    parser.flag(
        "--driver.changed",
        dest="driver_changed",
        choices=("auto", "exit", "restart"),
        metavar="WHAT",
        default="auto",
        help="reaction to a new driver: exit, restart or auto (default auto)",
        more="exit ends the process with status 5, restart replaces it by a new one; auto exits in a "
        "container and else restarts.",
    )
