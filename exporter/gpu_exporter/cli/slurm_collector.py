"""`gpu-exporter slurm-collector`: one process asks slurmctld for all nodes."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Parser, add_logging, add_web_config, optional_address


def build_parser() -> Parser:
    """Flags of `slurm-collector`."""
    parser = Parser(
        "slurm-collector",
        "Ask slurmctld once for all nodes. Their exporters read the answers with --attribution.slurm.collected.\n"
        "Run one in a cluster, as root or SlurmUser, so that it sees every job.",
        prefix="GPU_EXPORTER_SLURM_COLLECTOR_",
    )
    parser.flag(
        "--directory",
        type=Path,
        default=None,
        metavar="DIR",
        help="write NODE.json for each node here; the nodes read the directory, and only this user may write to it",
    )
    parser.flag(
        "--web.listen-address", dest="address", default="", metavar="[HOST]:PORT", help="serve the nodes over HTTP"
    )
    add_web_config(parser)
    parser.address(
        "--slurmrestd",
        optional_address,
        "",
        dest="slurmrestd",
        default=None,
        metavar="URL",
        help="ask slurmrestd at this address in place of Slurm's commands",
    )
    parser.flag(
        "--slurmrestd.token-file",
        dest="token_file",
        type=Path,
        default=None,
        help="output of `scontrol token`; read in each round",
    )
    parser.flag("--interval", type=positive_duration, default="90s", help="time between two rounds (default 90s)")
    parser.flag(
        "--once",
        action="store_true",
        default=False,
        is_verb=True,
        help="one round, then exit: 3 if Slurm did not answer (no variable)",
    )
    add_logging(parser)
    return parser


def run(given: list[str]) -> int:
    """Collects until a signal, or once; the exit code."""
    parser = build_parser()
    options = parser.read(given)
    from gpu_exporter.agent.runtime.collect import collect
    from gpu_exporter.common.logs import set_up_logging

    set_up_logging(options.log_level, options.log_format)
    if options.directory is None and options.once:
        parser.error("--once requires --directory")
    if options.directory is None and not options.address:
        parser.error("--directory or --web.listen-address is required")
    if options.directory is not None and not options.directory.is_dir():
        parser.fail(f"{options.directory}: no such directory")
    if (options.slurmrestd is not None) != (options.token_file is not None):
        parser.error("--slurmrestd and --slurmrestd.token-file must be set together")
    slurmrestd = (options.slurmrestd, options.token_file) if options.slurmrestd is not None else None
    try:
        return collect(
            slurmrestd, options.directory, options.interval, options.address, options.web_config, once=options.once
        )
    except (ValueError, OSError) as exc:
        parser.fail(str(exc))
