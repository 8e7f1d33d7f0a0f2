"""Train, prune, squeeze: two small networks on the digits that ship inside scikit-learn.

python -m squeeze_release.demo
"""

from __future__ import annotations

import copy
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import squeeze_release as sr

SEED = 0
BATCH = 64
LEARNING_RATE = 4e-3
L1 = 1e-3  # penalty on the weights while pruning
DENSE_EPOCHS = 20  # before the first weight goes
PRUNING_STEPS = 12  # from all weights to `keep` of them, on a cubic schedule
EPOCHS_A_STEP = 4
FINAL_EPOCHS = 15  # after the last weight went
TIMED_BATCH, TIMED_RUNS = 256, 60


@dataclass(frozen=True)
class Digits:
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Net:
    name: str
    keep: float  # the fraction of Linear and Conv2d weights that survives pruning
    build: Callable[[], nn.Module]


def mlp() -> nn.Module:
    def hidden(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]

    return nn.Sequential(nn.Flatten(), *hidden(64, 512), *hidden(512, 512), *hidden(512, 256), nn.Linear(256, 10))


def convnet() -> nn.Module:
    def hidden(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [*hidden(1, 32), *hidden(32, 64), *hidden(64, 128)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


NETS = [
    Net("MLP 64-512-512-256-10 with BatchNorm", keep=0.004, build=mlp),
    Net("ConvNet 1-32-64-128-10 with BatchNorm", keep=0.008, build=convnet),
]


def load() -> Digits:
    """8 x 8 pixels in [0, 1], a fifth of them held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED)
    train_x, test_x, train_y, test_y = map(torch.from_numpy, split)
    return Digits(train_x, train_y, test_x, test_y)


def prunable(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


def train(model: nn.Module, digits: Digits, epochs: int, l1: float = 0.0) -> Iterator[None]:
    """Adam with a learning rate that falls linearly; yields after every epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=epochs)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(digits.train_x)).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(digits.train_x[batch]), digits.train_y[batch])
            if l1:
                loss = loss + l1 * torch.stack([layer.weight.abs().sum() for layer in prunable(model)]).sum()
            loss.backward()
            optimizer.step()
        schedule.step()
        yield


def prune_gradually(model: nn.Module, digits: Digits, keep: float) -> Iterator[None]:
    """Global magnitude pruning, a little at a time, all of it with torch.nn.utils.prune; yields after every epoch.

    The L1 penalty makes neurons compete, so that whole rows and columns die rather than single weights everywhere.
    """
    weights = [(layer, "weight") for layer in prunable(model)]
    alive = 1.0
    for step in range(1, PRUNING_STEPS + 1):
        target = keep + (1 - keep) * (1 - step / PRUNING_STEPS) ** 3
        prune.global_unstructured(weights, prune.L1Unstructured, amount=1 - target / alive)
        alive = target
        yield from train(model, digits, EPOCHS_A_STEP, l1=L1)
    yield from train(model, digits, FINAL_EPOCHS)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    predictions = model.eval()(digits.test_x).argmax(1)
    return float((predictions == digits.test_y).double().mean())


def non_zero(model: nn.Module) -> int:
    return sum(int(p.count_nonzero()) for p in model.parameters())


def file_size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getbuffer().nbytes


@torch.no_grad()
def latencies(models: list[nn.Module], x: Tensor) -> list[float]:
    """Median seconds a call, the models taking turns so that a busy machine slows all of them alike."""
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(TIMED_RUNS):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def show(console: Console, net: Net, digits: Digits) -> None:
    torch.manual_seed(SEED)
    model = net.build()
    epochs = DENSE_EPOCHS + PRUNING_STEPS * EPOCHS_A_STEP + FINAL_EPOCHS
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=epochs)
        for _ in train(model, digits, DENSE_EPOCHS):
            progress.advance(task)
        dense = copy.deepcopy(model).eval()
        progress.update(task, description="pruning")
        for _ in prune_gradually(model, digits, net.keep):
            progress.advance(task)

    pruned = model.eval()
    small, report = sr.squeeze(pruned, digits.test_x)
    console.rule(net.name, align="left")
    print(report)
    print()
    console.print(comparison(dense, pruned, small, report, digits))
    with torch.no_grad():
        changed = (pruned(digits.test_x).argmax(1) != small(digits.test_x).argmax(1)).sum().item()
    print(f"{changed} of {len(digits.test_y)} held-out predictions changed by squeezing.\n")


def comparison(dense: nn.Module, pruned: nn.Module, small: nn.Module, report: sr.Report, digits: Digits) -> Table:
    models = [dense, pruned, small]
    stored = [sum(p.numel() for p in model.parameters()) for model in models]
    alive = [non_zero(dense), report.mask_alive, non_zero(small)]
    files = [file_size(model) for model in models]
    milliseconds = [1e3 * seconds for seconds in latencies(models, digits.test_x[:TIMED_BATCH])]
    error = "not verified" if report.max_error is None else f"{report.max_error:.1e}"

    table = Table("", "dense", "pruned", "squeezed", "pruned / squeezed")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("parameters stored", *(f"{n:,}" for n in stored), f"{stored[1] / stored[2]:.1f}x")
    table.add_row("  of them not zero", *(f"{n:,}" for n in alive))
    table.add_row("file, bytes", *(f"{n:,}" for n in files), f"{files[1] / files[2]:.1f}x")
    table.add_row(
        f"ms for {TIMED_BATCH} images",
        *(f"{ms:.2f}" for ms in milliseconds),
        f"{milliseconds[1] / milliseconds[2]:.1f}x",
    )
    table.add_row("held-out accuracy", *(f"{accuracy(model, digits):.2%}" for model in models))
    table.add_row("max error, float64", "", "", error)
    return table


def main() -> int:
    console = Console()
    torch.set_num_threads(1)  # layers this small gain nothing from more, and lose much on a busy machine
    try:
        digits = load()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "sklearn":
            raise
        print("The demo trains on the digits inside scikit-learn, which is not installed here:", file=sys.stderr)
        print("    pip install 'squeeze-release[demo]'", file=sys.stderr)
        return 1
    console.print(f"8 x 8 digits: {len(digits.train_y):,} to train on, {len(digits.test_y)} held out\n")
    for net in NETS:
        show(console, net, digits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
