"""`gpu-exporter slurm-collector`: this process asks slurmctld, so that no node has to."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Options, Parser, add_logging, add_web_config, optional_address


def build_parser() -> Parser:
    parser = Parser(
        "slurm-collector",
        "Ask slurmctld once for all nodes. Their exporters read the answers with --attribution.slurm.collected.\n"
        "Run one collector in each cluster, as root or SlurmUser, so that it sees every job.",
        prefix="GPU_EXPORTER_SLURM_COLLECTOR_",
    )
    parser.flag(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory for one file per node (NODE.json), which the nodes read; only this user may write there",
    )
    parser.flag(
        "--web.listen-address", dest="address", default="", metavar="[HOST]:PORT", help="serve the nodes over HTTP"
    )
    add_web_config(parser)
    parser.address(
        "--slurmrestd",
        optional_address,
        "",
        metavar="URL",
        help="ask slurmrestd at this address in place of Slurm's commands",
    )
    parser.flag(
        "--slurmrestd.token-file",
        dest="token_file",
        type=Path,
        help="file with the output of `scontrol token`; read in each round",
    )
    parser.flag("--interval", type=positive_duration, default="90s", help="time between two rounds (default 90s)")
    parser.flag(
        "--once", action="store_true", is_verb=True, help="do one round and exit, with status 3 if Slurm did not answer"
    )
    add_logging(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Collects until a signal, or once. Returns the exit code."""
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
