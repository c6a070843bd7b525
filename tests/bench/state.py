"""The state file: CPU and bytes of one write, which the agent makes every `state.write_interval`.

python -m tests.bench.state [--writes 50]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId

NODES = ((8, 0, 1), (8, 7, 1), (8, 7, 4))  # GPUs, instances of each, holders of each unit


def make_ledger(gpus: int, instances: int, holders: int) -> Ledger:
    ledger = Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0)
    units = [
        UnitId(f"GPU-{g:036d}", f"MIG-{i:036d}" if instances else "")
        for g in range(gpus)
        for i in range(max(1, instances))
    ]
    for now in (1.0, 2.0, 3.0):
        held = []
        for at, unit in enumerate(units):
            ledger.record(Activity(unit, (Span(now - 1.0, now, 0.5),), 2))
            for number in range(holders):
                key = HolderKey("kubernetes", f"{at:036d}-{number}/main")
                holder = Holder(key, pod=f"pod-{at}", namespace=f"team-{number}")
                held.append(ConfirmedAllocation(Allocation(unit, holder), now, None))
        ledger.charge_poll(now, 1e9 + now, held)
    return ledger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=50)
    writes = parser.parse_args().writes
    for gpus, instances, holders in NODES:
        ledger = make_ledger(gpus, instances, holders)
        with tempfile.TemporaryDirectory() as directory:
            state = StateFile(Path(directory), 1.0, "boot")
            began = time.process_time()
            for _ in range(writes):
                prepared = state.prepare(ledger)
                state.commit(prepared)
                state.adopt(prepared)
            cpu_ms = 1e3 * (time.process_time() - began) / writes
        print(
            f"{gpus} GPUs, {instances} instances each, {holders} holders: {cpu_ms:.2f} ms, {len(prepared.text) / 1e3:.0f} kB"
        )


if __name__ == "__main__":
    main()
