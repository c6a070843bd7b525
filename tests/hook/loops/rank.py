"""One rank of a training with gloo: RANK FOLDER SLOW-RANK PHASES. The slow one loads 20 ms, the other 1 ms a batch."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpu_exporter_torch import observe


class Samples(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.zeros(1)


rank, folder, slow, phases = sys.argv[1:]
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
torch.set_num_threads(1)
# The ranks meet in a file: another program may take a port between its choice and its use.
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=2)
loader = DataLoader(Samples(0.020 if rank == slow else 0.001), batch_size=1)
value = torch.zeros(8)
with observe(loader, phases=bool(int(phases)), directory=folder, summary=False) as observed:
    for _ in observed:
        with observed.phase("collective"):
            torch.distributed.all_reduce(value)
torch.distributed.destroy_process_group()
