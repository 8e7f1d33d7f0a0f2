"""How a recipe is started: what is the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..cycle import Config, Result, cycle
from ..cycle.config import Evaluate, Listener, MakeOptimizer, TrainEpoch


@dataclass(frozen=True)
class Launch:
    """One run of one recipe: the seed, the folders, the devices, and changes to the preset's Config."""

    seed: int = 0
    mode: str = "squeeze-release"
    rules: str | None = None  # instead of the preset's
    data: str | Path | None = None
    start: str | Path | None = None  # a checkpoint to start from, instead of training
    run_dir: str | Path | None = None
    resume: bool = False
    listeners: Sequence[Listener] = ()
    accelerator: Any = None
    changes: tuple[tuple[str, Any], ...] = ()
    stop_after: float | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return (0, 1) if self.accelerator is None else (self.accelerator.process_index, self.accelerator.num_processes)

    @property
    def one_gpu(self) -> bool:
        """Then a training step can be recorded; several talk to each other, which a graph does not record."""
        return self.device.type == "cuda" and self.ranks[1] == 1

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward() if self.accelerator is None else self.accelerator.backward(loss)

    def cycle(
        self,
        model: nn.Module,
        example_inputs: Any,
        config: Config,
        train_epoch: TrainEpoch,
        optimizer: MakeOptimizer,
        evaluate: Evaluate,
        test: Evaluate,
    ) -> Result:
        config = replace(config, mode=self.mode, seed=self.seed, rules=self.rules or config.rules, **dict(self.changes))
        with fastest_convolutions():
            return cycle(
                model, example_inputs, config=config,
                train_epoch=train_epoch, optimizer=optimizer, evaluate=evaluate, test=test,
                run_dir=self.run_dir, resume=self.resume, listeners=self.listeners, accelerator=self.accelerator,
                stop_after=self.stop_after,
            )  # fmt: skip


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """cuDNN tries all that it has on the first step. Left to its rules it launches a kernel a channel on small maps."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
