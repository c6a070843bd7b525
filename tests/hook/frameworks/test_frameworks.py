"""The newest Lightning, Trainer and Accelerate with the hook: the same results, and the truth about waits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from gpu_exporter_torch import observe
from gpu_exporter_torch.lightning import LightningObserver
from gpu_exporter_torch.transformers import TrainerObserver

pytestmark = [  # of Lightning: it advises srun and other settings, and uses what torch has deprecated
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")
]
WITHIN = 0.1  # share of a step: the frameworks' own work is part of it


class Samples(Dataset[Any]):
    def __init__(self, number: int = 120, seconds: float = 0.0, *, named: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(number, 8, generator=generator)
        self.seconds, self.named = seconds, named

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        target = self.inputs[index].sum(0, keepdim=True)
        return {"inputs": self.inputs[index], "labels": target} if self.named else (self.inputs[index], target)


def read_report(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("run-*.json")
    return dict(json.loads(path.read_text()))


class Module(pl.LightningModule):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer, self.seconds, self.losses = torch.nn.Linear(8, 1), seconds, list[float]()

    def training_step(self, batch: Any, index: int) -> Any:
        time.sleep(self.seconds)
        loss = ((self.layer(batch[0]) - batch[1]) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        time.sleep(0.01)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, seconds: float, wait: float, *observers: Any) -> list[float]:
    pl.seed_everything(3, verbose=False)
    module = Module(seconds)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        val_check_interval=20, default_root_dir=folder, callbacks=list(observers),
    )  # fmt: skip
    trainer.fit(module, DataLoader(Samples(60, wait)), DataLoader(Samples(30)))
    return module.losses


def test_lightning(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    plain = fit(tmp_path, 0.01, 0.005)
    observed = fit(tmp_path, 0.01, 0.005, LightningObserver(directory=reports, summary=False))
    assert observed == plain
    report = read_report(reports)
    assert (report["state"], report["batches"], report["optimizer_steps"], report["epochs"]) == ("ended", 120, 120, 2)
    share = report["wait_seconds"] / report["step_seconds"]
    assert share == pytest.approx(0.005 / 0.015, abs=WITHIN), "evaluations are no wait"
    assert report["facts"]["precision"] == "float32"


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(8, 1)
        self.post_init()

    def forward(self, inputs: Any, labels: Any) -> Any:
        time.sleep(0.01)
        outputs = self.layer(inputs)
        return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}


def train(folder: Path, *observers: Any) -> list[float]:
    torch.manual_seed(3)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=10, save_strategy="no", logging_steps=5, report_to="none", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, seed=3,
    )  # fmt: skip
    trainer = Trainer(
        Model(PretrainedConfig()), arguments, train_dataset=Samples(60, 0.005, named=True),
        eval_dataset=Samples(20, named=True), callbacks=list(observers),
    )  # fmt: skip
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_the_trainer(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    assert train(tmp_path, TrainerObserver(directory=reports, summary=False)) == train(tmp_path)
    report = read_report(reports)
    assert (report["state"], report["steps"], report["epochs"]) == ("ended", 60, 2)
    share = report["wait_seconds"] / report["step_seconds"]
    assert share == pytest.approx(0.005 / 0.015, abs=WITHIN), "evaluations are no wait"


def test_accelerate_in_both_orders() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(Samples(40), batch_size=4))
    assert isinstance(prepared, DataLoaderShard)
    observed = observe(prepared, summary=False)
    assert len(list(observed)) == len(observed) == 10
    assert observed.report()["batches"] == 10
    first = observe(DataLoader(Samples(40), batch_size=4), summary=False)
    again = accelerator.prepare(first.loader)
    assert isinstance(again, DataLoaderShard), "the hook must not keep Accelerate from preparing the loader"
    assert len(list(again)) == 10
