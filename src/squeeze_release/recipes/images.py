"""CIFAR-10 for networks of today: what `convnext_cifar10` and `vit` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from ..cycle import Config, Result
from ..cycle.config import MakeOptimizer
from ..errors import InputError
from .data import Images, Split, cifar10
from .launch import Launch
from .training import Batches, Training, accuracy, normalised

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


@dataclass(frozen=True)
class Preset:
    """A network, and how it is trained: AdamW, a flat rate while pruning and a cosine elsewhere."""

    config: Config
    build: Callable[..., nn.Module]
    size: int  # of the images, in pixels
    batch: int
    rates: dict[str, float]
    weight_decay: float
    pad: int = 4
    images: int | None = None  # only so many of each part: for a try
    share: float = 1.0  # of the training images that an epoch sees, drawn anew
    distillation: float = 0.0  # share of the loss that comes from the unpruned network
    mix: bool = False  # two images into one


def run_preset(preset: Preset, launch: Launch, split: Split | None = None) -> Result:
    split = split or cifar10(launch.data)
    train, validation, test = (
        resized(part[: preset.images], preset.size, launch.device)
        for part in (split.train, split.validation, split.test)
    )
    torch.manual_seed(launch.seed)
    model = preset.build().to(launch.device)
    if launch.start is not None:
        load_checkpoint(model, Path(launch.start))
    return launch.cycle(
        model,
        validation[0][:4],
        preset.config,
        train_epoch=training_of(preset, Batches(*train, preset.batch, *launch.ranks, preset.pad), launch),
        optimizer=make_optimizer(preset, launch),
        evaluate=lambda net: accuracy(net, *validation, size=preset.batch),
        test=lambda net: accuracy(net, *test, size=preset.batch),
    )


def training_of(preset: Preset, batches: Any, launch: Launch) -> Training:
    return Training(batches, preset.rates, launch, preset.distillation, preset.share, bfloat16=True, mix=preset.mix)


def make_optimizer(preset: Preset, launch: Launch) -> MakeOptimizer:
    gpu = launch.device.type == "cuda"
    return lambda net, phase: AdamW(
        net.parameters(), preset.rates[phase], weight_decay=preset.weight_decay, fused=gpu, capturable=gpu
    )


def resized(images: Images, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Normalised and resized once: they stay on the device."""
    x, y = normalised(images, MEAN, STD, device)
    if x.shape[-1] != size:
        x = torch.cat([F.interpolate(part, size=(size, size), mode="bilinear") for part in x.split(1000)])
    return x, y


def load_checkpoint(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"the checkpoint does not fit: {error}",
            where=str(path),
            consequence="no run was started",
            remedy="give a safetensors file with the state_dict of this recipe's network",
        ) from error
