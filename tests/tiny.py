"""A run of the cycle that takes a second: a small network on points of four classes.

python tests/tiny.py RUN_DIR [--resume] [--mode baseline]      as a process of its own, to be killed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import squeeze_release as sr

CONFIG = sr.CycleConfig(
    train_epochs=3, prune_epochs=6, finetune_epochs=2, final_epochs=2, max_cycles=3, last_ratio=0.02, threshold=0.9,
    max_drop=0.5, judged="after training", release_pool="column",
)  # fmt: skip


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points around four centres in 12 dimensions, of which 4 say nothing."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    centres[:, 8:] = 0
    labels = torch.randint(4, (count,), generator=generator)
    return centres[labels] + torch.randn(count, 12, generator=generator), labels


def network(norm: str = "batch") -> nn.Module:
    torch.manual_seed(0)
    make = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm]
    return nn.Sequential(nn.Linear(12, 32), make(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


class Training:
    """Batches of 32 in random order; under accelerate each rank takes its share of every batch."""

    def __init__(self, accelerator: Any = None, momentum: float = 0.9) -> None:
        self.x, self.y = points(512, 1)
        self.validation, self.testing = points(256, 2), points(256, 3)
        self.accelerator, self.momentum = accelerator, momentum
        self.rank, self.ranks = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)

    def optimizer(self, model: nn.Module, phase: str) -> Optimizer:
        return SGD(model.parameters(), 0.02 if phase == "finetune" else 0.05, momentum=self.momentum)

    def epoch(self, model: nn.Module, optimizer: Optimizer, epoch: sr.Epoch) -> None:
        for batch in torch.randperm(len(self.y)).split(32):
            mine = batch[self.rank :: self.ranks]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(self.x[mine]), self.y[mine])
            loss.backward() if self.accelerator is None else self.accelerator.backward(loss)
            optimizer.step()

    def evaluate(self, model: nn.Module) -> float:
        return accuracy(model, *self.validation)

    def test(self, model: nn.Module) -> float:
        return accuracy(model, *self.testing)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def run(
    config: sr.CycleConfig = CONFIG,
    model: nn.Module | None = None,
    training: Training | None = None,
    listeners: Sequence[Any] = (),
    **arguments: Any,
) -> sr.CycleResult:
    training = training or Training(arguments.get("accelerator"))
    return sr.cycle(
        model or network(),
        training.validation[0][:32],
        train_epoch=training.epoch,
        evaluate=training.evaluate,
        optimizer=training.optimizer,
        test=training.test,
        config=config,
        listeners=listeners,
        **arguments,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--mode", default="squeeze-release")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = replace(CONFIG, mode=arguments.mode)
    result = run(config, run_dir=arguments.run_dir, resume=arguments.resume, checkpoint_seconds=0)
    print(json.dumps(result.summary))


if __name__ == "__main__":
    main()
