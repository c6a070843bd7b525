"""`gpu-exporter record`: records the driver's answers, so that they can be replayed elsewhere."""

from __future__ import annotations

from pathlib import Path

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Options, Parser, add_config, add_format, add_logging, read_config


def build_parser() -> Parser:
    parser = Parser(
        "record",
        "Record every answer of the driver, with its latency, for a bug report. The file names no process, "
        "user or host.",
        usage="gpu-exporter record FILE [FLAGS]",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file to write, e.g. node.rec.gz")
    parser.flag("--duration", type=positive_duration, default="60s", help="how long to record (default 60s)")
    parser.flag("--interval", type=positive_duration, default="1s", help="time between two cycles (default 1s)")
    parser.flag(
        "--hash-identifiers",
        dest="hashed",
        action="store_true",
        help="replace UUIDs by salted hashes; the salt is not stored",
    )
    add_format(parser, more="; for the printed summary")
    add_config(parser)
    add_logging(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Records for the duration or until a signal. Returns the exit code."""
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.agent.runtime.record import RecordingRequest, record
    from gpu_exporter.common.logs import set_up_logging

    set_up_logging(options.log_level, options.log_format)
    try:
        wish = RecordingRequest(options.file, options.duration, options.interval, options.hashed, options.format)
        return record(wish, settings)
    except OSError as exc:
        parser.fail(str(exc))
