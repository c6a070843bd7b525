"""The callback for Lightning: Trainer(callbacks=[LightningObserver()])."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from gpu_exporter_torch.callbacks import FrameworkLoop, FrameworkTraining

PRECISIONS = {
    "32-true": "float32",
    "16-mixed": "mixed",
    "bf16-mixed": "mixed",
    "16-true": "float16",
    "bf16-true": "bfloat16",
}


class LightningObserver(Callback):  # type: ignore[misc, unused-ignore]
    """Observes `fit`. `options`: as for `observe`, without loader, optimizer and model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._loop = FrameworkLoop(**options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def describe() -> FrameworkTraining:
            precision = PRECISIONS.get(str(trainer.precision))
            optimizers = [getattr(each, "optimizer", each) for each in trainer.optimizers]
            facts = {} if precision is None else {"precision": precision}
            return FrameworkTraining(trainer.train_dataloader, optimizers, pl_module, facts)

        self._loop.begin(describe)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._loop.begin_batch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loop.end_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.interrupt()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loop.interrupt(is_over=False)  # the file is written afterwards

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._loop.finish()
