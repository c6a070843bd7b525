"""`gpu-exporter check-monitors`: checks that the Prometheus operator's servers select the monitors and rules."""

from __future__ import annotations

import json
import sys

from gpu_exporter.cli.parser import Options, Parser, add_format, add_help
from gpu_exporter.cli.reconciler_flags import add_kubeconfig
from gpu_exporter.common.exits import Exit


def build_parser() -> Parser:
    parser = Parser(
        "check-monitors",
        "Check that a Prometheus of the Prometheus operator selects the monitors and rules of "
        "gpu-exporter.\nEnds with status 2 if one of them is selected by no Prometheus. An object that cannot be "
        "read counts as unknown, not as a fault.",
    )
    add_kubeconfig(parser)
    parser.flag(
        "--kubernetes.namespace",
        dest="namespaces",
        action="append",
        metavar="NAMESPACE",
        help="look for monitors and rules only here (repeatable)",
    )
    parser.flag(
        "--kubernetes.selector",
        dest="labels",
        default="",
        metavar="LABELS",
        help="labels of the monitors and rules (default app.kubernetes.io/name=gpu-exporter)",
    )
    add_format(parser, "text")
    add_help(parser)
    return parser


def run(parser: Parser, options: Options) -> int:
    """Prints the finding about each object. Returns the exit code."""
    from gpu_exporter.reconciler.marks import MarkError

    try:
        from gpu_exporter.reconciler.kubernetes.client.api import connect
        from gpu_exporter.reconciler.kubernetes.monitors import OURS, compare

        findings = compare(connect(options.kubeconfig), namespaces=options.namespaces, labels=options.labels or OURS)
    except ModuleNotFoundError as exc:
        parser.fail(f"this needs the kubernetes client: pip install 'kubernetes>=36' ({exc})")
    except MarkError as exc:
        sys.stdout.write(f"unknown: the monitors and rules of gpu-exporter cannot be read: {exc}\n")
        return Exit.DONE
    if options.format == "json":
        sys.stdout.write(json.dumps([each._asdict() for each in findings], indent=2) + "\n")
    else:
        lines = [f"{each.state}: {each.object}: {each.seen}" for each in findings]
        lines += dict.fromkeys(each.to_do for each in findings if each.to_do)
        sys.stdout.write("\n".join(lines or ["there are no monitors and rules of gpu-exporter"]) + "\n")
    return Exit.USAGE if any(each.state == "unselected" for each in findings) else Exit.DONE
