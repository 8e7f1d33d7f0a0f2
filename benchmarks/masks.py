"""What it costs to keep pruned weights zero: seconds of a training step with and without the mask, side by side.

    python benchmarks/masks.py [--device cuda]

Each row is a network; steps with and without the hook take turns in one process, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conftest  # noqa: F401  makes torchvision importable, which timm wants
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from squeeze_release import prune
from squeeze_release.recipes import fc_mnist

ROUNDS = 60


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    started = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def overhead(build: Callable[[], nn.Module], x: Tensor) -> tuple[float, float]:
    """Median seconds of a step, and of one with masks."""
    y = torch.randint(10, (len(x),), device=x.device)
    runs = []
    for masked in (False, True):
        model = build().to(x.device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        if masked:
            masks = prune.Masks(model, prune.find_targets(model))
            masks.prune(prune.magnitude(model), keep=0.1)
            optimizer.register_step_post_hook(masks.keep)
        runs.append((model, optimizer))
    times: list[list[float]] = [[], []]
    for number in range(ROUNDS + 5):
        for (model, optimizer), seconds in zip(runs, times, strict=True):
            taken = step(model, optimizer, x, y)
            if number >= 5:
                seconds.append(taken)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    cases: list[tuple[str, Callable[[], nn.Module], Tensor]] = [
        ("fc-mnist, batch 128", fc_mnist.build, torch.randn(128, 1, 28, 28, device=device)),
        ("convnext_atto, 32 px, batch 32", lambda: timm.create_model("convnext_atto", num_classes=10),
         torch.randn(32, 3, 32, 32, device=device)),
        ("vit_tiny, 64 px, batch 32", lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10),
         torch.randn(32, 3, 64, 64, device=device)),
    ]  # fmt: skip
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, median of {ROUNDS}")
    for name, build, x in cases:
        plain, masked = overhead(build, x)
        print(f"{name:34} {1e3 * plain:8.2f} ms   with masks {1e3 * masked:8.2f} ms   {masked / plain - 1:+.1%}")


if __name__ == "__main__":
    main()
