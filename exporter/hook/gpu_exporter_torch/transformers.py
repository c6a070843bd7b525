"""The callback for the Trainer of Hugging Face: Trainer(callbacks=[TrainerObserver()])."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from gpu_exporter_torch.callbacks import FrameworkLoop, FrameworkTraining


class TrainerObserver(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Observes `train`. `options`: as for `observe`, without loader, optimizer and model.

    The Trainer calls back only after it has loaded all batches of a step, so each step counts as one batch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._loop = FrameworkLoop(**options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def describe() -> FrameworkTraining:
            facts = {"precision": "mixed"} if args.bf16 or args.fp16 else {}
            return FrameworkTraining(kwargs.get("train_dataloader", ()), (), kwargs.get("model"), facts)

        self._loop.begin(describe)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.begin_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.end_batch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.interrupt()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.interrupt()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.interrupt()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.end_epoch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._loop.finish()
