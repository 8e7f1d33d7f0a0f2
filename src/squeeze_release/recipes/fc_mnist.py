"""A fully connected network on MNIST: the paper's first table.

    squeeze-release run fc-mnist --preset paper --seed 0 --run-dir runs/fc-0
    squeeze-release run fc-mnist --preset paper --mode baseline --seed 0 --run-dir runs/fc-baseline-0

Presets: `paper`, the published protocol; `quick`, minutes on two cores; `best`, what we found to be best.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import SGD

from ..cycle import Config, Result
from .data import mnist
from .launch import Launch
from .training import Batches, Training, accuracy, normalised

WIDTHS = (784, 128, 256, 128, 128, 64, 10)
BATCH = 128
MEAN, STD = [0.1307], [0.3081]
RATES = {"train": 0.1, "prune": 0.1, "finetune": 0.01, "final": 0.01}


@dataclass(frozen=True)
class Preset:
    config: Config
    rates: dict[str, float] = field(default_factory=lambda: RATES)
    distillation: float = 0.0  # share of the loss that comes from the unpruned network


PRESETS = {
    "paper": Preset(Config(train_epochs=160, release_pool="column", rules="paper")),
    "quick": Preset(
        Config(train_epochs=8, prune_epochs=30, finetune_epochs=6, final_epochs=10, max_cycles=2, score="mean",
               judged="after training", finish_units=1.0, last_ratio=0.005, threshold=0.9, release_pool="column",
               min_accuracy=0.96),
    ),
    "best": Preset(
        Config(train_epochs=40, prune_epochs=40, finetune_epochs=20, final_epochs=60, max_cycles=20, score="mean",
               judged="after training", finish_units=1.0, threshold=0.95, release_pool="column",
               min_accuracy=0.9703, final_gain=0.003, retries=4),  # the floor is the paper's accuracy
        rates={phase: 0.1 for phase in RATES} | {"prune": 0.05}, distillation=0.5,
    ),
}  # fmt: skip


def build() -> nn.Module:
    """Linear, BatchNorm, SELU, five times, and a Linear: 193,226 parameters, 191,104 of them Linear weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(WIDTHS[:-1]):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.SELU()]
    return nn.Sequential(*layers, nn.Linear(*WIDTHS[-2:]))


def run(preset: str, launch: Launch) -> Result:
    recipe, split, device = PRESETS[preset], mnist(launch.data), launch.device
    torch.set_num_threads(1)  # layers this small gain nothing from more
    train, validation, test = (
        normalised(part, MEAN, STD, device) for part in (split.train, split.validation, split.test)
    )
    torch.manual_seed(launch.seed)
    return launch.cycle(
        build().to(device),
        validation[0][:256],
        recipe.config,
        train_epoch=Training(Batches(*train, BATCH, *launch.ranks), recipe.rates, launch, recipe.distillation),
        optimizer=lambda net, phase: SGD(net.parameters(), recipe.rates[phase], momentum=0.9, weight_decay=5e-4),
        evaluate=lambda net: accuracy(net, *validation),
        test=lambda net: accuracy(net, *test),
    )
