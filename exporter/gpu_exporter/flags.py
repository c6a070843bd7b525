"""The flags of every command. No logic beyond naming them; how they are read is parser.py's."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_exporter.exits import list_exits
from gpu_exporter.parser import Parser, duration, file_mode, positive_duration
from gpu_exporter.version import VERSION

DEFAULT_PORT = ":9836"
DEFAULT_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
DEFAULT_LOGS = "/var/log/pods"
DEFAULT_STATE = "/var/lib/gpu-exporter"
COLLECTORS = {  # name: on by default. A test compares with collectors.ALL, which a parser need not load.
    "utilization": True,
    "video": True,
    "gpm": True,
    "memory": True,
    "power": True,
    "thermal": True,
    "clocks": True,
    "throttle": True,
    "throttle-active": False,
    "pcie": True,
    "nvlink": True,
    "ecc": True,
    "remap": True,
    "recovery": True,
    "xid": True,
    "processes": True,
    "mig": True,
}
DESCRIPTION = """Who holds which GPU, is it used, and if not, why.

commands:
  (none)           serve metrics and the status page; with --once print one reading
  reconcile        decide from metrics which holders are underused; with --apply, mark them
  explain          why one holder has its stage, and what became of its marks
  pause            mark nothing for a while, and count no idle time before its end
  holders          who holds what, and by which evidence; takes the flags of --once
  digest           what some days came to, by tenant and holder, from Prometheus
  slurm-collector  ask slurmctld for all nodes, in place of each of them
  demo             a simulated node on a compressed clock
  check-config     read a configuration file and print what is in force
  record           write down what the driver answers, to be replayed elsewhere
  forget           a GPU was taken out: no longer expect it
"""
EPILOG = f"""signals:
  SIGUSR1       release the driver (for an upgrade, or to switch MIG)
  SIGHUP        reopen it

exit codes:
{list_exits()}"""


def add_common(parser: Parser) -> None:
    parser.flag("--config.file", dest="config_file", type=Path, default=None, help="YAML file over the defaults")
    add_logging(parser)


def add_logging(parser: Parser) -> None:
    parser.flag(
        "--log.level",
        dest="log_level",
        choices=("debug", "info", "warn", "error"),
        default="info",
        help="(default info)",
    )
    parser.flag(
        "--log.format",
        dest="log_format",
        choices=("logfmt", "json"),
        default="logfmt",
        help="(default logfmt)",
    )
    parser.add_argument("--version", action="version", version=f"gpu-exporter {VERSION}")


def build_serve_parser() -> Parser:
    """Flags of the exporter proper."""
    usage = "gpu-exporter [FLAGS]\n       gpu-exporter COMMAND [FLAGS]"
    parser = Parser("gpu-exporter", DESCRIPTION, EPILOG, usage)
    parser.flag(
        "--web.listen-address",
        dest="address",
        default=DEFAULT_PORT,
        help=f"[host]:port (default {DEFAULT_PORT})",
    )
    add_web_config(parser)
    parser.flag(
        "--web.telemetry-path",
        dest="telemetry_path",
        default="/metrics",
        help="path of the metrics (default /metrics)",
    )
    parser.flag(
        "--web.hosts",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="further host name for the page and JSON, which answer to addresses, names without a dot, cluster "
        "Services and this host; repeatable",
    )
    parser.flag(
        "--web.socket-mode",
        dest="socket_mode",
        type=file_mode,
        default="0660",
        help="who may read the unix socket in the state directory, for --once: 0666 is every user (default 0660, the "
        "exporter's user and group)",
    )
    parser.flag("--once", action="store_true", default=False, help="print one reading and exit")
    parser.flag(
        "--format",
        dest="format",
        choices=("prometheus", "openmetrics", "json", "table", "holders"),
        default="prometheus",
        help="form of --once (default prometheus)",
    )
    parser.flag(
        "--check",
        dest="check",
        choices=("all", "devices"),
        default="all",
        help="what the exit code of --once is about: devices leaves out sources of holders, as a node's health check "
        "should (default all)",
    )
    parser.flag("--output", dest="output", type=Path, default=None, help="with --once: write here, by rename")
    parser.flag(
        "--timeout",
        dest="timeout",
        type=duration,
        default="10s",
        help="with --once: longest wait (default 10s)",
    )
    parser.flag(
        "--textfile.output",
        dest="textfile",
        type=Path,
        default=None,
        help="stay resident without HTTP and keep this file fresh for node_exporter",
    )
    parser.flag(
        "--textfile.interval",
        dest="textfile_interval",
        type=duration,
        default="60s",
        help="how often that file is written (default 60s)",
    )
    parser.flag(
        "--state.directory",
        dest="state_directory",
        default=DEFAULT_STATE,
        help=f"where counters survive a restart, empty for none (default {DEFAULT_STATE})",
    )
    for name, on in COLLECTORS.items():
        parser.flag(
            f"--collector.{name}",
            dest=f"collector_{name}",
            action=argparse.BooleanOptionalAction,
            default=on,
            help=f"(default {'on' if on else 'off'})",
        )
    parser.flag(
        "--collector.xid.kmsg",
        dest="xid_kmsg",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read XIDs for which NVML has no event, such as 62, from the kernel's log; needs CAP_SYSLOG (default off)",
    )
    parser.flag("--path.kmsg", dest="kmsg", type=Path, default=Path("/dev/kmsg"), help="that log (default /dev/kmsg)")
    _add_sources(parser)
    parser.flag(
        "--devices.scenario",
        dest="scenario",
        type=Path,
        default=None,
        help="simulate the node that this scenario file describes",
    )
    parser.flag(
        "--devices.replay",
        dest="replay",
        action="append",
        type=Path,
        default=[],
        help="replay this log of nvidia-smi as a GPU, once for each GPU; or one file of `gpu-exporter record`",
    )
    parser.flag(
        "--driver.changed",
        dest="driver_changed",
        choices=("auto", "exit", "restart"),
        default="auto",
        help="when the driver was replaced: end with status 5, or restart (default auto: end in a container)",
    )
    parser.flag(
        "--path.sysfs",
        dest="sysfs",
        type=Path,
        default=Path("/sys"),
        help="where the kernel lists the PCI bus (default /sys)",
    )
    parser.flag(
        "--path.procfs",
        dest="procfs",
        type=Path,
        default=Path("/proc"),
        help="where the host's processes are (default /proc)",
    )
    parser.flag(
        "--path.cgroup",
        dest="cgroup",
        type=Path,
        default=Path("/sys/fs/cgroup"),
        help="where the host's cgroups are, which say what pods and jobs do on the host (default /sys/fs/cgroup)",
    )
    add_common(parser)
    return parser


def _add_sources(parser: Parser) -> None:
    parser.flag(
        "--attribution.kubelet",
        dest="kubelet",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the kubelet who holds what (default: when its socket directory exists)",
    )
    parser.flag(
        "--attribution.kubelet.socket",
        dest="kubelet_socket",
        type=Path,
        default=Path(DEFAULT_SOCKET),
        help=f"(default {DEFAULT_SOCKET})",
    )
    parser.flag(
        "--attribution.kubelet.logs",
        dest="kubelet_logs",
        type=Path,
        default=Path(DEFAULT_LOGS),
        help=f"where the pods' log directories are, whose names hold the UIDs (default {DEFAULT_LOGS})",
    )
    parser.flag(
        "--attribution.slurm",
        dest="slurm",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask Slurm who holds what (default: when this host has a slurm.conf or runs slurmd)",
    )
    parser.flag(
        "--attribution.slurm.node",
        dest="slurm_node",
        default="",
        help="this node's NodeName (default: short host name)",
    )
    parser.flag(
        "--attribution.slurm.gres-conf",
        dest="slurm_gres_conf",
        type=Path,
        default=None,
        help="the gres.conf that slurmd reads (default: beside slurm.conf, or slurmd's own copy)",
    )
    parser.flag(
        "--attribution.slurm.job-files",
        dest="slurm_job_files",
        type=Path,
        default=None,
        help="directory in which a prolog writes who has which GPU: ours, jobstats' gpustat, dcgm-exporter's "
        "hpc-job-mapping-dir (default: /run/gpu-exporter/jobs where it is)",
    )
    parser.flag(
        "--attribution.slurm.collected",
        dest="slurm_collected",
        default="",
        help="directory or http(s):// address of `gpu-exporter slurm-collector`; then this node never asks slurmctld",
    )
    parser.flag(
        "--attribution.monitor",
        dest="monitors",
        action="append",
        default=[],
        metavar="NAMESPACE/POD",
        help="pods whose resource claims only watch GPUs (adminAccess), so that they hold none: a namespace, and a "
        "regular expression for the pods' names in it; once for each (those of NVIDIA's GPU operator are known)",
    )
    parser.flag(
        "--attribution.claims",
        dest="claims",
        type=Path,
        default=None,
        metavar="DIRECTORY",
        help="folder of the DRA driver's kubelet plugin, whose checkpoint says which resource claims only watch GPUs, "
        "e.g. /var/lib/kubelet/plugins/gpu.nvidia.com (default: none is read)",
    )
    parser.flag(
        "--attribution.pod-uid",
        dest="pod_uid",
        default="",
        help="UID of the exporter's own pod: a look at the host's cgroups says that a pod has ended only where it "
        "finds this one (default: by /proc/self/cgroup)",
    )
    add_resources(parser)
    parser.flag(
        "--attribution.process",
        dest="process",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="contradict a mapping by the cgroups of the processes on each GPU; a mapping that is contradicted is "
        "unknown, never idle (default: when --path.procfs shows the host's processes)",
    )
    parser.flag("--attribution.static", dest="static", type=Path, default=None, help="YAML list of who holds what")


def add_resources(parser: Parser) -> None:
    """One flag for the agent, which reads devices from the kubelet, and the reconciler, which reads limits of pods."""
    parser.flag(
        "--attribution.resource",
        dest="resources",
        action="append",
        default=[],
        help="regular expression of a further Kubernetes resource whose devices are GPUs; once for each, the same for "
        "exporter and reconciler",
    )


def add_web_config(parser: Parser) -> None:
    parser.flag(
        "--web.config.file",
        dest="web_config",
        type=Path,
        default=None,
        help="TLS and passwords of the port, in the format of Prometheus's exporter-toolkit; read again when changed",
    )


def build_slurm_collector_parser() -> Parser:
    """Flags of `slurm-collector`."""
    parser = Parser(
        "gpu-exporter slurm-collector",
        "Ask slurmctld once for all nodes: what their exporters read with --attribution.slurm.collected. Run one in a "
        "cluster, as root or SlurmUser, so that it sees every job.",
    )
    parser.flag(
        "--directory",
        type=Path,
        default=None,
        help="write NODE.json for each node, in a directory that the nodes see and nobody else may write in",
    )
    parser.flag("--web.listen-address", dest="address", default="", help="[host]:port, to serve the nodes over HTTP")
    parser.flag(
        "--slurmrestd",
        dest="slurmrestd",
        default="",
        help="http(s):// address of slurmrestd, to ask in place of Slurm's commands",
    )
    parser.flag(
        "--slurmrestd.token-file",
        dest="token_file",
        type=Path,
        default=None,
        help="what `scontrol token` printed; read in each round",
    )
    add_web_config(parser)
    parser.flag("--interval", type=positive_duration, default="90s", help="time between two rounds (default 90s)")
    parser.flag("--once", action="store_true", default=False, help="one round, then exit: 3 without an answer of Slurm")
    add_logging(parser)
    return parser


def build_top_parser() -> Parser:
    """Flags of `top`."""
    parser = Parser("gpu-exporter top", "The GPUs of this node, or of several, and who holds them, on the terminal.")
    parser.flag(
        "--from",
        dest="nodes",
        action="append",
        metavar="HOST:PORT",
        help="a node's exporter, as HOST, HOST:PORT or URL; repeatable (default 127.0.0.1:9836)",
    )
    parser.flag("--interval", type=duration, default=2.0, help="between two readings (default 2s)")
    parser.flag("--sort", default="waste", help="waste, gpu, util, memory, power, temp or held (default waste)")
    parser.flag("--filter", dest="words", default="", metavar="WORDS", help="only rows that have all of these words")
    parser.flag("--once", action="store_true", help="print the table and end, as without a terminal")
    parser.add_argument("--version", action="version", version=f"gpu-exporter {VERSION}")
    return parser


def build_demo_parser() -> Parser:
    """Flags of `demo`."""
    parser = Parser("gpu-exporter demo", "A simulated node on a compressed clock, with the reconciler's dry run.")
    parser.flag(
        "--web.listen-address",
        dest="address",
        default="127.0.0.1:0",
        help="[host]:port (default 127.0.0.1, free port)",
    )
    parser.flag(
        "--speed",
        type=float,
        default=180.0,
        help="seconds of the node's clock in a real second (default 180)",
    )
    parser.flag(
        "--duration",
        type=duration,
        default=None,
        help="end after this time (default: 60s, never at a terminal)",
    )
    parser.add_argument("--version", action="version", version=f"gpu-exporter {VERSION}")
    return parser


def build_record_parser() -> Parser:
    """Flags of `record`."""
    parser = Parser(
        "gpu-exporter record",
        "Write down every answer of the driver, with its latency: what to send along with a report. No process, "
        "user or host is named in it.",
    )
    parser.add_argument("file", type=Path, help="where to write, e.g. node.rec.gz")
    parser.flag("--duration", type=positive_duration, default="60s", help="how long (default 60s)")
    parser.flag("--interval", type=positive_duration, default="1s", help="time between two cycles (default 1s)")
    parser.flag(
        "--hash-identifiers",
        dest="hashed",
        action="store_true",
        default=False,
        help="replace UUIDs by hashes with a salt that is not kept",
    )
    add_common(parser)
    return parser


def build_forget_parser() -> Parser:
    """Flags of `forget`."""
    parser = Parser("gpu-exporter forget", "No longer expect a GPU that was taken out of this node.")
    parser.add_argument("uuid", help="GPU-..., as in gpu_up")
    parser.flag(
        "--state.directory",
        dest="state_directory",
        type=Path,
        default=Path(DEFAULT_STATE),
        help=f"(default {DEFAULT_STATE})",
    )
    return parser


def build_check_config_parser() -> Parser:
    """Flags of `check-config`."""
    parser = Parser("gpu-exporter check-config", "Read a configuration file and print what is in force.")
    parser.add_argument("file", type=Path, help="YAML file")
    return parser
