"""A fully connected network on MNIST: the paper's first table.

    squeeze-release run fc-mnist --preset paper --seed 0 --run-dir runs/fc-0
    squeeze-release run fc-mnist --preset paper --mode baseline --seed 0 --run-dir runs/fc-baseline-0

Presets: `paper`, the published protocol; `quick`, minutes on two cores; `best`, what we found to be best.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..cycle import Config, Epoch, Result, cycle
from ..cycle.config import Listener
from .data import mnist
from .training import Batches, accuracy, cosine, distilled, normalised, set_learning_rate

WIDTHS = (784, 128, 256, 128, 128, 64, 10)
BATCH = 128
MEAN, STD = [0.1307], [0.3081]
RATES = {"train": 0.1, "prune": 0.1, "finetune": 0.01, "final": 0.01}


@dataclass(frozen=True)
class Preset:
    config: Config
    rates: dict[str, float]
    distillation: float = 0.0  # share of the loss that comes from the unpruned network


PRESETS = {
    "paper": Preset(Config(train_epochs=160, release_pool="column", rules="paper"), RATES),
    "quick": Preset(
        Config(train_epochs=8, prune_epochs=30, finetune_epochs=6, final_epochs=10, max_cycles=2, score="mean",
               finish_units=1.0, last_ratio=0.005, threshold=0.9, release_pool="column"),
        RATES,
    ),
    "best": Preset(
        Config(train_epochs=40, prune_epochs=40, finetune_epochs=20, final_epochs=60, score="mean", finish_units=1.0,
               threshold=0.93, release_pool="column", min_accuracy=0.9703),
        RATES,
        distillation=0.7,
    ),
}  # fmt: skip


def build() -> nn.Module:
    """Linear, BatchNorm, SELU, five times, and a Linear: 193,226 parameters, 191,104 of them Linear weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(WIDTHS[:-1]):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.SELU()]
    return nn.Sequential(*layers, nn.Linear(*WIDTHS[-2:]))


def run(
    preset: str,
    *,
    seed: int = 0,
    mode: str = "squeeze-release",
    data: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    accelerator: Any = None,
    **changes: Any,
) -> Result:
    """One seed of one preset. `changes` go to its Config."""
    recipe = PRESETS[preset]
    device = accelerator.device if accelerator is not None else torch.device("cpu")
    torch.set_num_threads(1)  # layers this small gain nothing from more
    split = mnist(data)
    train, validation, test = (
        normalised(images, MEAN, STD, device) for images in (split.train, split.validation, split.test)
    )
    ranks = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    batches = Batches(*train, BATCH, *ranks)
    torch.manual_seed(seed)
    model = build().to(device)
    return cycle(
        model,
        validation[0][:256],
        train_epoch=Trainer(batches, recipe, accelerator),
        evaluate=lambda net: accuracy(net, *validation),
        optimizer=lambda net, phase: SGD(net.parameters(), recipe.rates[phase], momentum=0.9, weight_decay=5e-4),
        config=replace(recipe.config, mode=mode, seed=seed, **changes),
        test=lambda net: accuracy(net, *test),
        run_dir=run_dir,
        resume=resume,
        listeners=listeners,
        accelerator=accelerator,
    )


@dataclass
class Trainer:
    """SGD on cross-entropy. The rate is flat while pruning and falls as a cosine elsewhere."""

    batches: Batches
    recipe: Preset
    accelerator: Any = None

    def __call__(self, model: nn.Module, optimizer: Optimizer, epoch: Epoch) -> None:
        rate = self.recipe.rates[epoch.phase]
        set_learning_rate(optimizer, rate if epoch.phase == "prune" else cosine(rate, epoch))
        advice = self._advice(epoch)
        for x, y in self.batches:
            optimizer.zero_grad()
            loss = distilled(model(x), y, advice(x), self.recipe.distillation)
            loss.backward() if self.accelerator is None else self.accelerator.backward(loss)
            optimizer.step()

    def _advice(self, epoch: Epoch) -> Callable[[Tensor], Tensor | None]:
        """What the unpruned network says about a batch."""
        if epoch.phase == "train" or not self.recipe.distillation:
            return lambda x: None
        return torch.no_grad()(epoch.unpruned().eval())
