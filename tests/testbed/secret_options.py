"""Which options may contain a secret, and which are harmless. A new option has to be added to one of the two."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from gpu_exporter.cli.arguments import duration, file_mode, moment, positive_duration
from gpu_exporter.cli.commands import COMMANDS, SERVE

# The secret is a part of the text: refused in an argument, allowed in a variable.
IN_TEXT = frozenset((
    "--alertmanager.url", "--attribution.slurm.collected", "--from", "--slurmrestd", "--source.exporter",
    "--source.header", "--source.prometheus",
))  # fmt: skip
# The secret is in the file.
IN_FILE = frozenset((
    "--from.basic-auth.password-file", "--kubernetes.kubeconfig", "--slurmrestd.token-file",
    "--source.basic-auth.password-file", "--source.bearer-token-file", "--source.header-file", "--source.tls.key",
    "--web.config.file",
))  # fmt: skip
HARMLESS = frozenset((
    "--alertmanager.filter", "--attribution.claims", "--attribution.kubelet.logs", "--attribution.kubelet.socket",
    "--attribution.monitor", "--attribution.pod-uid", "--attribution.reservation", "--attribution.resource", "--attribution.slurm.gres-conf",
    "--attribution.slurm.job-files", "--attribution.slurm.node", "--attribution.static", "--audit.file", "--check",
    "--config.file", "--currency", "--devices.replay", "--devices.scenario", "--directory", "--filter",
    "--from.basic-auth.username", "--keep", "--kubernetes.lease", "--kubernetes.namespace", "--kubernetes.selector", "--mail.from", "--mail.smtp", "--mail.to", "--output", "--path.cgroup", "--path.kmsg",
    "--path.procfs", "--path.sysfs", "--pause.file", "--policy", "--price", "--reason", "--records", "--rest", "--source.basic-auth.username", "--source.file", "--source.matcher",
    "--source.tls.ca", "--source.tls.cert", "--speed", "--state.directory", "--textfile.output", "--top", "--web.hosts",
    "--web.listen-address", "--web.telemetry-path", "FILE", "HOLDER", "NAME", "UUID",
))  # fmt: skip
# Settings that are free texts. help_url and grafana are addresses that everybody reads: a password there is refused.
HARMLESS_SETTINGS = frozenset((
    "actions.kinds", "actions.override", "diagnosis.without", "alerts.dcgm", "alerts.exclude", "alerts.grafana", "alerts.nvidia_smi",
    "alerts.pod_labels", "alerts.pool_label", "alerts.queue_label", "alerts.reconciler", "alerts.resources",
    "alerts.selector", "alerts.slurm_collector", "alerts.team_label", "attribution.slurm_pods", "policy.help_url",
    "policy.pause_when", "policy.serving_kinds", "policy.serving_labels", "policy.system_namespaces",
    "policy.tenant_label",
))  # fmt: skip
# Variables without a flag that may contain one: of Slurm's commands, and of Python's HTTP client.
VARIABLES = ("SLURM_JWT", "http_proxy")


def list_texts() -> Iterator[tuple[str, str, argparse.Action]]:
    """Command, name and action of every option that takes a free text or a file."""
    for command, module in {"": SERVE, **COMMANDS}.items():
        for action in module.load().build_parser()._actions:
            is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
            if not (is_switch or action.choices or action.type in (duration, positive_duration, file_mode, moment)):
                name = action.option_strings[0] if action.option_strings else str(action.metavar)
                yield command, name, action
