"""The loop of docs/torch.md: samples that take 5 ms each to make, and a small model. Needs torch.

python tests/workloads/slow_loop.py --workers 0
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpu_exporter_torch import observe


class Samples(Dataset[Any]):
    """512 samples; each waits 5 ms, as for a file on a remote disk."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.randn(64), torch.zeros(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    loader = DataLoader(Samples(), batch_size=8, num_workers=parser.parse_args().workers)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(32)), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with observe(loader, optimizer=optimizer, model=model) as batches:
        for inputs, targets in batches:
            loss = ((model(inputs) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
