"""What the recipes share: data that lives on the device, batches, accuracy, learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..cycle import Epoch
from .data import Images

Augment = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batches:
    """Images on the device, normalised once; an epoch is a permutation of them. No loader, no worker processes."""

    x: Tensor
    y: Tensor
    size: int
    rank: int = 0
    ranks: int = 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches in random order, the same on every rank, each of which takes its share of each batch."""
        order = torch.randperm(len(self.y)).to(self.y.device)
        for batch in order[: len(order) // self.size * self.size].split(self.size):
            mine = batch[self.rank :: self.ranks]
            yield self.x[mine], self.y[mine]

    def __len__(self) -> int:
        return len(self.y) // self.size


def normalised(
    images: Images, mean: list[float], std: list[float], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    x = images.x.to(device).float() / 255
    shape = (1, -1, 1, 1)
    x = (x - torch.tensor(mean, device=device).view(shape)) / torch.tensor(std, device=device).view(shape)
    return x, images.y.to(device)


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


def distilled(logits: Tensor, labels: Tensor, teacher: Tensor | None, share: float, temperature: float = 4.0) -> Tensor:
    """Cross-entropy with the labels, and a share of it with what the teacher says, softened."""
    loss = F.cross_entropy(logits, labels)
    if teacher is None or not share:
        return loss
    soft = F.kl_div(
        F.log_softmax(logits / temperature, -1), F.log_softmax(teacher / temperature, -1), log_target=True,
        reduction="batchmean",
    )  # fmt: skip
    return (1 - share) * loss + share * temperature**2 * soft
