"""When does compaction="index" pay? Parameters and latency of ResNet-18 under filter masks.

    python benchmarks/compaction.py [--threads 1] [--rounds 15] [--device cpu] [--json FILE]

A share of the filters of every convolution is zero, at random: `unaligned`, each convolution has a mask of its own;
`aligned`, those that write to one residual stream share theirs. Three networks that compute the same:
  masked   as it was, full of zeros
  dense    squeeze(model, x)
  indexed  squeeze(model, x, compaction="index")
They take turns in every round, in eager and float32, under no_grad. Times are medians over the rounds; the ratio is the
median of the ratios of single rounds to `dense`, with its quartiles, for rounds see the same noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conftest  # noqa: F401  makes torchvision importable
import torch
from resnets import plant, resnet18
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import squeeze_release as sr

INPUTS = {"cpu": ((1, 64), (1, 224), (8, 128)), "cuda": ((1, 224), (64, 224))}  # batch, pixels
MASKS = ((False, 0.25), (False, 0.5), (False, 0.75), (True, 0.5))  # aligned, share of dead filters


@dataclass
class Row:
    masks: str
    batch: int
    pixels: int
    network: str
    params: int
    milliseconds: float
    to_dense: float
    low: float
    high: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=list(INPUTS), default="cpu")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = f"{options.threads} thread(s) of {platform.machine()}" if options.device == "cpu" else "one GPU"
    console = Console(width=120)
    console.print(f"torch {torch.__version__}, {where}, channels last: {options.channels_last}")
    rows = []
    for aligned, dead in MASKS:
        networks = build(aligned, dead)
        for batch, pixels in INPUTS[options.device]:
            x = torch.randn(batch, 3, pixels, pixels)
            ready = {name: prepare(net, x, options.device, options.channels_last) for name, net in networks.items()}
            params = {name: sum(p.numel() for p in net.parameters()) for name, net in networks.items()}
            label = f"{dead:.0%} {'aligned' if aligned else 'unaligned'}"
            for name, times in measure(ready, options.rounds).items():
                rows.append(row(label, batch, pixels, name, params[name], times))
    console.print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def build(aligned: bool, dead: float) -> dict[str, nn.Module]:
    masked = resnet18("zero")
    plant(masked, aligned, dead)
    x = torch.randn(1, 3, 64, 64)
    dense = sr.squeeze(masked, x).model
    return {"masked": masked, "dense": dense, "indexed": sr.squeeze(masked, x, compaction="index").model}


def prepare(net: nn.Module, x: Tensor, device: str, channels_last: bool) -> Callable[[], None]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net, x = net.eval().to(device, memory_format=layout), x.to(device, memory_format=layout)

    def run() -> None:
        with torch.no_grad():
            net(x)
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    return run


def measure(ready: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and times what `dense` took in the same round. A sample lasts a twentieth of a second at least."""
    repeats = max(1, round(0.05 / timed(ready["dense"], 3)))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    for _ in range(rounds):
        taken = {name: timed(run, repeats) for name, run in ready.items()}
        for name, seconds in taken.items():
            samples[name].append((seconds, seconds / taken["dense"]))
    return samples


def row(masks: str, batch: int, pixels: int, name: str, params: int, times: list[tuple[float, float]]) -> Row:
    seconds, ratios = zip(*times, strict=True)
    low, middle, high = quantiles(ratios, n=4)
    return Row(masks, batch, pixels, name, params, 1e3 * median(seconds), middle, low, high)


def timed(run: Callable[[], None], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def table(rows: list[Row]) -> Table:
    result = Table("masks", "input", "network", "parameters", "ms", "time / dense", "quartiles")
    for column in (3, 4, 5):
        result.columns[column].justify = "right"
    for row in rows:
        result.add_row(
            row.masks,
            f"{row.batch} x 3 x {row.pixels} x {row.pixels}",
            row.network,
            f"{row.params:,}",
            f"{row.milliseconds:.1f}",
            f"{row.to_dense:.2f}",
            f"{row.low:.2f} .. {row.high:.2f}",
        )
    return result


if __name__ == "__main__":
    main()
