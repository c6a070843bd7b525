"""Prints one reading, for `gpu-exporter --once` and `gpu-exporter holders`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.cli.agent_parts import build_backend, build_processes, build_sources
from gpu_exporter.cli.parser import Parser, read_config
from gpu_exporter.common.files import SharedDirectory, check_kept

SWITCH_INTERVAL_S = 0.0005  # a thread that returns from the driver need not wait 5 ms for an import in another thread


def find_state(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Returns the state directory, and a problem as text. The directory is None if unset or with a problem."""
    directory = Path(options.state_directory) if options.state_directory else None
    try:
        if directory is not None:
            check_kept(directory)
    except SharedDirectory as exc:
        return None, f"{directory}: {exc.strerror}; the command ignores this directory, and asks no running exporter"
    except OSError:  # missing, or closed to this user: a later access reports it
        pass
    return directory, ""


def print_reading(parser: Parser, options: argparse.Namespace) -> int:
    """Prints one reading and returns the exit code. Without a daemon, reads the GPUs while other modules load."""
    settings = read_config(parser, options.config_file).settings
    from gpu_exporter.agent.runtime.reading import make_readers, take_one_view
    from gpu_exporter.common.clock import SYSTEM_CLOCK

    clock = SYSTEM_CLOCK
    backend, simulated, _ = build_backend(parser, options, clock)
    directory, problem = find_state(options)
    socket_path = directory / "gpu-exporter.sock" if directory is not None and backend.is_live else None
    enabled = {name for name in COLLECTORS if getattr(options, f"collector_{name}")}
    reading = make_readers(settings, backend, clock, enabled, options.timeout)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if socket_path is None or not socket_path.exists():
        reading.start()
    from gpu_exporter.agent.ledger.state import StateFile, StateInUse, read_boot_id
    from gpu_exporter.agent.runtime.once import run_once
    from gpu_exporter.agent.runtime.surroundings import Host

    if problem:
        sys.stderr.write(f"gpu-exporter: {problem}\n")
    # A file continues the counters of the file before it. A reading at the prompt changes nothing.
    state = None
    if options.output is not None and directory is not None:
        state = StateFile(directory, settings.state.write_interval, read_boot_id())
    recall = (lambda: state.past) if state is not None else None
    sources = [*build_sources(parser, options, clock, settings, backend.vendor, directory, recall), *simulated]
    processes = build_processes(parser, options, backend, clock)
    host = Host(options.sysfs if backend.is_live else None, processes, directory=directory)
    try:
        return run_once(
            lambda: take_one_view(settings, backend, reading, sources, clock, host, state),
            options.format,
            options.output,
            options.timeout,
            socket_path,
            backend.name,
            checks=options.check,
        )
    except (OSError, StateInUse) as exc:
        parser.fail(str(exc))
