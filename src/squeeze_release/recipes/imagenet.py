"""A folder of photographs, one sub-folder a class: read by worker processes, for there are too many to hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..cycle import Result
from ..errors import InputError
from .images import Preset, load_checkpoint, make_optimizer, training_of
from .launch import Launch

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
WORKERS = 8
_ENDINGS = {".jpeg", ".jpg", ".png", ".webp"}


def run_folder(preset: Preset, launch: Launch) -> Result:
    """`train/` is split into training and validation images, `val/` is the test set."""
    classes, train = find_images(launch.data, "train")
    _, test = find_images(launch.data, "val")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = min(10_000, max(1, len(train) // 10))
    parts = [[train[i] for i in order[held_out:]], [train[i] for i in order[:held_out]], test]
    batches, validation, testing = (
        Loader(Photographs(files, preset.size, moving=part == 0), preset.batch, launch, shuffled=part == 0)
        for part, files in enumerate(parts)
    )
    torch.manual_seed(launch.seed)
    model = _network(preset, launch, len(classes))
    return launch.cycle(
        model,
        next(iter(validation))[0][:4],
        preset.config,
        train_epoch=training_of(preset, batches, launch),
        optimizer=make_optimizer(preset, launch),
        evaluate=validation.accuracy,
        test=testing.accuracy,
    )


def _network(preset: Preset, launch: Launch, classes: int) -> nn.Module:
    """From a checkpoint, or with the weights that timm downloads."""
    if launch.start is not None:
        model = preset.build(num_classes=classes).to(launch.device)
        load_checkpoint(model, Path(launch.start))
        return model
    try:
        return preset.build(num_classes=classes, pretrained=True).to(launch.device)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"timm cannot get its trained weights: {error}",
            where="squeeze-release run vit --preset paper",
            consequence="no run was started",
            remedy="give a checkpoint of your own with --start",
        ) from error


def find_images(folder: str | Path | None, part: str) -> tuple[list[str], list[tuple[Path, int]]]:
    """The classes, and every image with the number of its class."""
    root = Path(folder or ".") / part
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() in _ENDINGS
    ]
    if not found:
        raise InputError(
            "there are no images",
            where=str(root),
            consequence="no run was started",
            remedy=f"name the folder of ImageNet with --data; it must hold {part}/CLASS/*.JPEG",
        )
    return classes, found


class Photographs(Dataset[tuple[Tensor, int]]):
    """Resized to 8/7 of the size wanted, then cropped: in the middle, or at random and mirrored half of the time."""

    def __init__(self, files: list[tuple[Path, int]], size: int, moving: bool) -> None:
        self.files, self.size, self.moving = files, size, moving

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import numpy
        from PIL import Image

        path, label = self.files[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        scale = self.size * 8 / 7 / min(image.size)
        image = image.resize([max(self.size, round(side * scale)) for side in image.size])
        x = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
        room = [side - self.size for side in x.shape[1:]]
        top, left = (int(torch.randint(free + 1, ())) if self.moving else free // 2 for free in room)
        x = x[:, top : top + self.size, left : left + self.size]
        if self.moving and bool(torch.rand(()) < 0.5):
            x = x.flip(-1)
        return (x - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1), label


@dataclass(frozen=True)
class Loader:
    """Batches of photographs on the device; each rank reads a part of every batch."""

    photographs: Photographs
    size: int
    launch: Launch
    shuffled: bool

    def __len__(self) -> int:
        return max(1, len(self.photographs) // self.size) if self.shuffled else -(-len(self.photographs) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, (rank, ranks) = len(self.photographs), self.launch.ranks
        order = torch.randperm(count) if self.shuffled else torch.arange(count)
        mine = [part[rank::ranks].tolist() for part in order.split(self.size)[: len(self)]]
        workers: dict[str, Any] = {"num_workers": WORKERS if count > 1000 else 0}
        for x, y in DataLoader(self.photographs, batch_sampler=mine, pin_memory=torch.cuda.is_available(), **workers):
            yield x.to(self.launch.device, non_blocking=True), y.to(self.launch.device, non_blocking=True)

    def take(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Of the images that this rank sees; the cycle takes the mean over ranks."""
        hits, total = torch.zeros((), device=self.launch.device), 0
        for x, y in self:
            hits += (model(x).argmax(-1) == y).sum()
            total += len(y)
        return float(hits) / total
