"""MNIST and CIFAR-10 as tensors: from a folder, from the user's cache, or downloaded and checked.

Files are looked for in `--data DIR`, then in the cache ($XDG_CACHE_HOME or ~/.cache, squeeze-release/NAME), and are
downloaded to the cache if they are in neither. No pickle is read: CIFAR-10 comes as its binary archive, or as zip files
of lossless WebP strips.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_CIFAR_ARCHIVE, _CIFAR_MD5 = "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR_BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@dataclass(frozen=True)
class Images:
    """uint8 images, channels first, and their labels."""

    x: Tensor
    y: Tensor

    def __getitem__(self, which: slice | Tensor) -> Images:
        return Images(self.x[which], self.y[which])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Split:
    """Training, validation and test images. Only the first two may be looked at before the end."""

    train: Images
    validation: Images
    test: Images


def mnist(folder: str | Path | None = None, *, validation: int = 5000) -> Split:
    """55,000 + 5,000 + 10,000 images of 1 x 28 x 28, the validation images drawn once and for all."""
    files = {name: _find(name, "mnist", folder, _MNIST + name, md5) for name, md5 in _MNIST_FILES.items()}
    images = [_idx(path) for path in files.values()]
    train, test = Images(images[0][:, None], images[1].long()), Images(images[2][:, None], images[3].long())
    return _split(train, test, validation)


def cifar10(folder: str | Path | None = None, *, validation: int = 5000) -> Split:
    """45,000 + 5,000 + 10,000 images of 3 x 32 x 32."""
    read = _cifar_strips if _has_strips(folder) else _cifar_binary
    batches = read(folder)
    train = Images(torch.cat([batch.x for batch in batches[:5]]), torch.cat([batch.y for batch in batches[:5]]))
    return _split(train, batches[5], validation)


def _split(train: Images, test: Images, validation: int) -> Split:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    cut = max(len(train) - validation, len(train) // 2)  # small test sets of data too
    return Split(train[order[:cut]], train[order[cut:]], test)


def _idx(path: Path) -> Tensor:
    """The format of MNIST: two zeros, a type, the number of dimensions, sizes, bytes."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise _bad(path, "is no idx file of bytes")
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    values = torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8)
    if values.numel() != torch.Size(sizes).numel():
        raise _bad(path, f"holds {values.numel():,} bytes, its header says {sizes}")
    return values.view(sizes)


def _cifar_binary(folder: str | Path | None) -> list[Images]:
    archive = _find(_CIFAR_ARCHIVE, "cifar10", folder, _CIFAR + _CIFAR_ARCHIVE, _CIFAR_MD5)
    batches = []
    with tarfile.open(archive) as tar:
        for name in _CIFAR_BATCHES:
            member = tar.extractfile(f"cifar-10-batches-bin/{name}.bin")
            if member is None:
                raise _bad(archive, f"holds no {name}.bin")
            rows = torch.frombuffer(bytearray(member.read()), dtype=torch.uint8).view(-1, 3073)
            batches.append(Images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()))
    return batches


def _has_strips(folder: str | Path | None) -> bool:
    return any((place / f"{_CIFAR_BATCHES[0]}.zip").exists() for place in _places("cifar10", folder))


def _cifar_strips(folder: str | Path | None) -> list[Images]:
    """Zip files of WebP strips, 500 images below each other, and a file of labels."""
    import numpy
    from PIL import Image

    batches = []
    for name in _CIFAR_BATCHES:
        with zipfile.ZipFile(_find(f"{name}.zip", "cifar10", folder, "", "")) as file:
            labels = torch.frombuffer(bytearray(file.read("labels.u8")), dtype=torch.uint8).long()
            strips = sorted(entry for entry in file.namelist() if entry.endswith(".webp"))
            pixels = [numpy.asarray(Image.open(io.BytesIO(file.read(entry)))) for entry in strips]
        images = torch.from_numpy(numpy.concatenate(pixels)).view(-1, 32, 32, 3)
        batches.append(Images(images.permute(0, 3, 1, 2).contiguous(), labels))
    return batches


# ------------------------------------------------------------------------------------------------------------ the files


def _places(dataset: str, folder: str | Path | None) -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "squeeze-release" / dataset
    return [*([Path(folder), Path(folder) / dataset] if folder else []), cache]


def _find(name: str, dataset: str, folder: str | Path | None, url: str, md5: str) -> Path:
    places = _places(dataset, folder)
    for place in places:
        if (place / name).exists():
            return place / name
    target = places[-1] / name
    if not url:
        raise _missing(name, places, "it cannot be downloaded")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise _missing(name, places, f"{url} could not be read ({error})") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise _bad(target, f"as it comes from {url} has another checksum than the published one")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".part")
    beside.write_bytes(content)
    beside.replace(target)
    return target


def _missing(name: str, places: list[Path], why: str) -> InputError:
    return InputError(
        f"there is no {name}, and {why}",
        where=", ".join(map(str, places)),
        consequence="no run was started",
        remedy=f"put {name} into one of these folders, or name its folder with --data",
    )


def _bad(path: Path, what: str) -> InputError:
    return InputError(
        f"{path.name} {what}",
        where=str(path.parent),
        consequence="no run was started",
        remedy="delete the file and run again, so that it is downloaded anew",
    )


DATASETS: dict[str, Callable[..., Split]] = {"mnist": mnist, "cifar10": cifar10}
