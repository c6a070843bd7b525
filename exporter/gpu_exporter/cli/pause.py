"""`gpu-exporter pause`: begins, extends, shows or ends a pause of the reconciler."""

from __future__ import annotations

from gpu_exporter.cli.arguments import positive_duration
from gpu_exporter.cli.parser import Options, Parser, add_format, add_help
from gpu_exporter.cli.reconciler_flags import add_kubeconfig, add_pause_places


def build_parser() -> Parser:
    parser = Parser(
        "pause",
        "Pause marking while GPUs cannot be used, e.g. during maintenance. The reconciler withdraws existing "
        "marks\nafter policy.unsupported_max, and idle time before the end of the pause does not "
        "count.\nWithout --for and --end: print whether there is a pause.",
    )
    parser.flag("--for", dest="lasts", type=positive_duration, help="length of the pause, e.g. 4h")
    parser.flag("--reason", default="", metavar="TEXT", help="text that the reconciler shows with the pause")
    parser.flag("--end", action="store_true", help="end the pause now")
    add_format(parser, "text")
    add_kubeconfig(parser)
    add_pause_places(parser)
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Begins, extends, shows or ends the pause. Returns the exit code."""
    if bool(options.lease) == (options.pause_file is not None):
        parser.error("give --kubernetes.lease or --pause.file: the one that `reconcile` uses")
    if options.end and options.lasts is not None:
        parser.error("--for begins or prolongs a pause, and --end ends a pause: give one of them")
    from gpu_exporter.reconciler.marks import MarkError
    from gpu_exporter.reconciler.runtime.pause import end_pause, show_pause, start_pause
    from gpu_exporter.reconciler.runtime.targets import build_pause

    try:
        place = build_pause(options.kubeconfig, options.lease, options.pause_file)
        if options.end:
            return end_pause(place, options.format)
        if options.lasts is None:
            return show_pause(place, options.format)
        return start_pause(place, options.lasts, options.reason, options.format)
    except (ValueError, OSError, MarkError, ModuleNotFoundError) as exc:
        parser.fail(str(exc))
