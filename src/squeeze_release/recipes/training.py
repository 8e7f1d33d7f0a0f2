"""What the recipes share: data that lives on the device, batches, losses, accuracy, learning rates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..cycle import Epoch
from .data import Images
from .graphs import Replayed
from .launch import Launch


@dataclass(frozen=True)
class Batches:
    """Images on the device, normalised once; an epoch is a permutation of them. No loader, no worker processes.

    pad: crops at random from images with so much black around them, and mirrors half of them.
    """

    x: Tensor
    y: Tensor
    size: int
    rank: int = 0
    ranks: int = 1
    pad: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        """Whole batches in random order, the same on every rank, each of which takes its share of each batch.

        Of each batch only the numbers of its images: `take` is a part of the training step, which a GPU replays.
        """
        order = torch.randperm(len(self.y)).to(self.y.device)
        for batch in order[: len(self) * self.size].split(self.size):
            yield (batch[self.rank :: self.ranks],)

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        x = self.x[numbers]
        return crop_and_mirror(x, self.pad) if self.pad else x, self.y[numbers]

    def __len__(self) -> int:
        return len(self.y) // self.size


def normalised(images: Images, mean: list[float], std: list[float], device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (1, -1, 1, 1)
    x = images.x.to(device).float() / 255
    x = (x - torch.tensor(mean, device=device).view(shape)) / torch.tensor(std, device=device).view(shape)
    return x, images.y.to(device)


def crop_and_mirror(x: Tensor, pad: int) -> Tensor:
    """Every image at an offset of its own, all of them in one gather."""
    count, _, height, width = x.shape
    padded = F.pad(x, [pad] * 4)
    top, left = (torch.randint(2 * pad + 1, (count, 1), device=x.device) for _ in range(2))
    mirrored = torch.rand(count, 1, device=x.device) < 0.5
    rows = top + torch.arange(height, device=x.device)
    across = torch.arange(width, device=x.device).expand(count, -1)
    columns = left + torch.where(mirrored, across.flip(1), across)
    image = torch.arange(count, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mixing(count: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Adds to each of so many images, or of their labels, a share of another one (mixup, Zhang et al.)."""
    share, others = torch.rand(count, device=device), torch.rand(count, device=device).argsort()

    def mix(x: Tensor) -> Tensor:
        return x + share.view(-1, *[1] * (x.dim() - 1)) * (x[others] - x)

    return mix


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, size: int = 1000) -> float:
    hits = [(model(a).argmax(-1) == b).sum() for a, b in zip(x.split(size), y.split(size), strict=True)]
    return float(torch.stack(hits).sum()) / len(y)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def cosine(rate: float, epoch: Epoch) -> float:
    """From `rate` to 0 over the epochs of a phase."""
    return rate * 0.5 * (1 + math.cos(math.pi * epoch.index / epoch.total))


def distilled(
    logits: Tensor, labels: Tensor, teacher: nn.Module | None, x: Tensor, share: float, temperature: float = 2.0
) -> Tensor:
    """Cross-entropy with the labels, and for a share of it with what a teacher says, softened (Hinton et al.)."""
    loss = F.cross_entropy(logits, labels)
    if teacher is None:
        return loss
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        said = teacher(x.to(next(teacher.parameters()).dtype)).float()
    soft = F.log_softmax(said / temperature, -1)
    told = F.kl_div(F.log_softmax(logits / temperature, -1), soft, log_target=True, reduction="batchmean")
    return (1 - share) * loss + share * temperature**2 * told


@dataclass(frozen=True)
class Training:
    """An epoch: cross-entropy, of the labels and of a teacher. The rate is flat while pruning, else a cosine."""

    batches: Any  # iterates; has a length, and `take`, which makes images and labels of a batch
    rates: dict[str, float]  # by phase
    launch: Launch
    distillation: float = 0.0  # share of the loss that comes from the unpruned network
    share: float = 1.0  # of the batches that an epoch sees
    bfloat16: bool = False  # on a GPU, where it is fast
    mix: bool = False  # two images into one

    def __call__(self, model: nn.Module, optimizer: Optimizer, epoch: Epoch) -> None:
        rate = self.rates[epoch.phase]
        set_learning_rate(optimizer, rate if epoch.phase == "prune" else cosine(rate, epoch))
        step: Callable[..., None] = partial(self._step, model, optimizer, self._teacher(epoch))
        if self.launch.one_gpu:
            step = Replayed(step)
        for batch in islice(self.batches, max(1, round(self.share * len(self.batches)))):
            step(*batch)

    def _teacher(self, epoch: Epoch) -> nn.Module | None:
        """Only asked, never trained: a copy in bfloat16 need not be cast at every step."""
        if not self.distillation or epoch.phase == "train":
            return None
        return copy.deepcopy(epoch.unpruned()).bfloat16() if self._half else epoch.unpruned()

    @property
    def _half(self) -> bool:
        return self.bfloat16 and self.launch.device.type == "cuda"

    def _step(self, model: nn.Module, optimizer: Optimizer, teacher: nn.Module | None, *batch: Tensor) -> None:
        x, y = self.batches.take(*batch)
        mix = mixing(len(y), y.device) if self.mix else None
        x = x if mix is None else mix(x)
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._half):
            logits = model(x)
            labels = y if mix is None else mix(F.one_hot(y, logits.shape[-1]).float())
            loss = distilled(logits, labels, teacher, x, self.distillation)
        self.launch.backward(loss)
        optimizer.step()
