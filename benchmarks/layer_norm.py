"""CompensatedLayerNorm against F.layer_norm of the same kept width, forward and backward; exit code 1 over the bound.

    python benchmarks/layer_norm.py --out results/DATE-layer-norm/layer_norm.csv     # on a GPU, some minutes
    python benchmarks/layer_norm.py --sweep                                          # other tiles, to find better ones
    python benchmarks/layer_norm.py --device cpu --elements 100000 --rounds 5        # a try without a GPU

Ours, which lost half as many channels as it kept, F.layer_norm and nn.LayerNorm take turns. The value is the median
over rounds of ours / F.layer_norm, with quartiles. `eager` is a stream of calls, as a program makes them: on small
tensors the host decides, and samples are ten times as long. `graph` replays the calls as one CUDA graph: the kernels'
own time.
Sizes: `large` has --elements elements, `small` is one image of 197 tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.nn.functional as F
from timing import Spread, append, captured, interleaved, machine, markdown, rows_of
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.modules.kernels import rows as of_rows
from squeeze_release.modules.kernels import shortest, usual

WIDTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 4096)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = 197
CALLS = 20  # in one graph: a replay of one small kernel would be the host's time again
BOUND = 1.1
KEY = ("width", "dtype", "size", "pass", "how")


def norms(width: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    plain = nn.LayerNorm(width, device=device, dtype=dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    ours = sr.CompensatedLayerNorm(width, device=device, dtype=dtype)
    ours.merge(torch.randn(width // 2, dtype=torch.float64))
    ours.weight, ours.bias = plain.weight, plain.bias
    weight, bias = plain.weight, plain.bias
    return {"ours": ours, "F": lambda x: F.layer_norm(x, (width,), weight, bias, 1e-5), "nn": plain}


def calls(width: int, dtype: str, rows: int, which: str, device: str) -> dict[str, Callable[[], Any]]:
    x = torch.randn(rows, width, device=device, dtype=DTYPES[dtype])
    dy = torch.randn_like(x)
    made = norms(width, DTYPES[dtype], device)
    wrt = [x.requires_grad_(), *made["nn"].parameters()]  # type: ignore[attr-defined]

    def forward(norm: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        @torch.no_grad()
        def call() -> Tensor:
            return norm(x)

        return call

    def both(norm: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(norm(x), wrt, dy)

    return {name: (forward if which == "forward" else both)(norm) for name, norm in made.items()}


def many(call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: [call() for _ in range(CALLS)][-1]


def measure(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device != "cpu"
    rows = TOKENS if case["size"] == "small" else max(1, options.elements // case["width"])
    functions = calls(case["width"], case["dtype"], rows, case["pass"], options.device)
    divisor = 1
    if case["how"] == "graph":
        functions, divisor = {name: captured(many(call)) for name, call in functions.items()}, CALLS
    # A stream of small calls waits for the host alone, which takes some of them to get used to another function.
    longer = 10 if (case["size"], case["how"]) == ("small", "eager") else 1
    times = interleaved(functions, on_gpu, options.rounds, options.sample * longer)
    micro = {name: 1e6 * Spread.of(each).middle / divisor for name, each in times.items()}
    ratio = Spread.of([a / b for a, b in zip(times["ours"], times["F"], strict=True)])
    return {
        **case,
        "rows": rows,
        "F.layer_norm us": f"{micro['F']:.2f}",
        "nn.LayerNorm us": f"{micro['nn']:.2f}",
        "ours us": f"{micro['ours']:.2f}",
        "ratio": f"{ratio.middle:.3f}",
        "quartiles": f"{ratio.low:.3f} to {ratio.high:.3f}",
    }


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    hows = ("eager",) if options.device == "cpu" else ("eager", "graph")
    for values in product(options.widths, options.dtypes, ("large", "small"), ("forward", "forward+backward"), hows):
        yield dict(zip(KEY, values, strict=True))


def sweep(options: argparse.Namespace) -> None:
    """The kernels' own time on large tensors, for other tiles. Found a better one? The constants are in rows.py."""
    for width, dtype, which in product(options.widths, options.dtypes, ("forward", "forward+backward")):
        found = []
        for tile, elements in product((1024, 2048, 4096, 8192), (256, 512, 1024)):
            of_rows.TILE, of_rows.WARP_ELEMENTS = tile, elements
            shortest.forget()
            case = dict(zip(KEY, (width, dtype, "large", which, "graph"), strict=True))
            row = measure(case, options)
            found.append((float(row["ours us"]), tile, elements))
        best = ", ".join(f"{us:.1f} us ({tile}, {elements})" for us, tile, elements in sorted(found)[:4])
        now = next(us for us, *config in found if config == [2048, 512])
        print(f"{width} {dtype} {which}: F {row['F.layer_norm us']} us, now {now:.1f} us; best {best}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--elements", type=int, default=2**25, help="of a large tensor (33554432), more than a cache holds"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sample", type=float, default=2e-3, help="seconds of one sample (0.002)")
    parser.add_argument("--out", type=Path, help="a CSV file, written row by row; what it has is not measured again")
    parser.add_argument("--sweep", action="store_true", help="try other tiles instead")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu tries the script out")
    print(machine(), flush=True)
    if options.device != "cpu":
        norms(64, torch.float32, options.device)["ours"](torch.randn(1, 64, device=options.device))
        print("C++" if usual.wait() is not None else "C++ could not be built: Python", flush=True)
    if options.sweep:
        sweep(options)
        return 0
    rows: list[dict[str, Any]] = list(rows_of(options.out))
    done = {tuple(str(row[name]) for name in KEY) for row in rows}
    for case in cases(options):
        if tuple(str(case[name]) for name in KEY) in done:
            continue
        rows.append(measure(case, options))
        if options.out is not None:
            append(options.out, rows[-1])
        print(*rows[-1].values(), flush=True)
    print(markdown(rows))
    if options.device != "cpu":
        quick = sum(kernel.known is not None for kernel in of_rows._kernels.values())
        print(f"{len(of_rows._kernels)} kernels, {quick} of them without a look by Triton")
    over = [row for row in rows if float(row["ratio"]) > BOUND]
    for how in sorted({row["how"] for row in rows}):
        worst = max((row for row in rows if row["how"] == how), key=lambda row: float(row["ratio"]))
        count = sum(row["how"] == how for row in over)
        print(f"{how}: {count} over {BOUND}; the most is {worst['ratio']}: {[worst[name] for name in KEY]}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
