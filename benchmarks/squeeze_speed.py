"""What a squeeze costs beside torch.export, and CompensatedLayerNorm beside F.layer_norm; exit code 1 if a bound fails.

    python benchmarks/squeeze_speed.py [--threads 1] [--repeats 3] [--rounds 80] [--json FILE]

Squeeze: export and squeeze take turns, `--repeats` times; the value is the median, the spread from lowest to highest.
  export                every time in this process but the first, which imports half of torch
  trace                 the first step of squeeze: one eager run, and an export with norms as single ops
  analysis and rewrite  from the call of squeeze to the narrowed model, without that trace; it contains an export of the
                        narrowed model, to see that the code follows
  before verification   both together
  verification          old against new, in float64 and in float32
Norms: float32, no_grad; ours and theirs take turns in `--rounds` rounds. Times are lower quartiles, the value is their
ratio; the spread are the quartiles of the ratios of single rounds. Eager is a call of our module against a call of the
function F.layer_norm. Compiled is like with like: a function that calls the module, and one that calls F.layer_norm, as
both are inside a compiled network. The row "compiled module" has torch.compile(module) in place of the first: that call
costs microseconds of its own for any module, which show on small inputs. The bound holds for both.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conftest  # noqa: F401  makes torchvision importable, which timm wants
import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import squeeze_release as sr

MODELS = ("convnext_tiny", "vit_small_patch16_224")
NORM_SHAPES = ((8, 56, 56, 64), (2, 197, 288), (64, 128))
NORM_BOUNDS = {"eager": 4.0, "compiled": 1.3, "compiled module": 1.3}
MOST_EXPORTS, MOST_SECONDS = 3.0, 2.0
SAMPLE_SECONDS = 4e-3  # so long that the clock does not count, so short that rounds are many


@dataclass
class Row:
    """One line of the table. `value` is what the bound is about."""

    part: str
    what: str
    value: float
    spread: str
    unit: str = "s"
    bound: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.bound is None or self.value <= self.bound


# -------------------------------------------------------------------------------------------------------------- squeeze


@torch.no_grad()
def pruned(name: str) -> nn.Module:
    """Half of every MLP, one head of every attention, and a quarter of the depthwise filters with who reads them."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    attention = 0
    for module in model.modules():
        if hasattr(module, "conv_dw"):
            quarter = module.conv_dw.weight.size(0) // 4
            module.conv_dw.weight[:quarter] = 0
            module.mlp.fc1.weight[:, :quarter] = 0
        if hasattr(module, "fc1"):
            module.fc1.weight[::2] = 0
        if hasattr(module, "qkv"):
            head = attention % module.num_heads * module.head_dim
            module.qkv.weight.unflatten(0, (3, -1))[:, head : head + module.head_dim] = 0
            attention += 1
    return model


class Stopwatch:
    """Seconds in functions of the package, by wrapping the names that `squeeze` and `fit` call them by."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def watch(self, module: str, function: str, name: str) -> None:
        owner = import_module(f"squeeze_release.{module}")
        original = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.ended[name] = time.perf_counter()
                self.seconds[name] = self.seconds.get(name, 0.0) + self.ended[name] - started

        setattr(owner, function, timed)
        self._undo.append(lambda: setattr(owner, function, original))

    def __enter__(self) -> Stopwatch:
        self.watch("squeeze", "trace", "trace")
        self.watch("squeeze", "analyse", "analyse")
        self.watch("squeeze", "fit", "fit")
        self.watch("squeeze", "compare", "compare")
        self.watch("follow", "trace", "second trace")
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()


def time_squeeze(model: nn.Module, x: Tensor, verify: bool) -> tuple[dict[str, float], sr.Report]:
    with Stopwatch() as watch:
        started = time.perf_counter()
        report = sr.squeeze(model, x, verify=verify).report
    seconds = watch.seconds
    before = watch.ended["fit"] - started
    parts = {
        "trace": seconds["trace"],
        "constants": seconds["analyse"],
        "liveness, plan, rewrite": seconds["fit"] - seconds["second trace"],
        "export of the result": seconds["second trace"],
        "analysis and rewrite": before - seconds["trace"],
        "before verification": before,
    }
    if verify:
        parts["verification"] = watch.ended["compare"] - watch.ended["fit"]
    return parts, report


def squeeze_rows(name: str, repeats: int) -> list[Row]:
    model, x = pruned(name), torch.randn(1, 3, 224, 224)
    times: dict[str, list[float]] = {}
    torch.export.export(model, (x,), strict=False)  # imports and caches
    for turn in range(repeats):
        started = time.perf_counter()
        torch.export.export(model, (x,), strict=False)
        times.setdefault("export", []).append(time.perf_counter() - started)
        parts, report = time_squeeze(model, x, verify=turn == 0)
        for what, seconds in parts.items():
            times.setdefault(what, []).append(seconds)
        if turn == 0:
            note = f"{report.params_before:,} -> {report.params_after:,} parameters, max error {report.max_error:.0e}"
    bound = MOST_EXPORTS * median(times["export"]) + MOST_SECONDS
    bounded = ("analysis and rewrite", "before verification")
    return [
        Row(
            name,
            what,
            median(seconds),
            f"{min(seconds):.2f} to {max(seconds):.2f}" if len(seconds) > 1 else "one run",
            bound=bound if what in bounded else None,
            note=note if what == "export" else "3 exports + 2 s" if what in bounded else "",
        )
        for what, seconds in times.items()
    ]


# ---------------------------------------------------------------------------------------------------------------- norms


def pair(width: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Ours, which lost half as many channels as it kept, and F.layer_norm of the kept width."""
    ours = sr.CompensatedLayerNorm(width)
    ours.merge(torch.randn(width // 2, dtype=torch.float64))
    weight, bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
    ours.weight, ours.bias = weight, bias

    def theirs(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-5)

    return ours.eval(), theirs


def as_function(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x)


def sample(function: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - started) / calls


@torch.no_grad()
def norm_row(shape: tuple[int, ...], how: str, rounds: int) -> Row:
    x = torch.randn(shape)
    functions: list[Callable[[Tensor], Tensor]] = list(pair(shape[-1]))
    if how == "compiled":
        functions = [as_function(function) for function in functions]
    if how != "eager":
        torch._dynamo.reset()
        functions = [torch.compile(function, dynamic=False) for function in functions]
    for function in functions:
        sample(function, x, 3)
    calls = [max(1, round(SAMPLE_SECONDS / sample(function, x, 10))) for function in functions]
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for i in (0, 1) if turn % 2 else (1, 0):
            times[i].append(sample(functions[i], x, calls[i]))
    ours, theirs = (quantiles(t, n=4)[0] for t in times)
    low, _, high = quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    return Row(
        f"norm {'x'.join(map(str, shape))}",
        how,
        ours / theirs,
        f"{low:.2f} to {high:.2f}",
        "x",
        NORM_BOUNDS[how],
        f"{ours * 1e6:.1f} us against {theirs * 1e6:.1f} us",
    )


# ---------------------------------------------------------------------------------------------------------------- print


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for column in ("", "", "value", "spread", "at most", "holds", ""):
        table.add_column(column, justify="right" if column in ("value", "at most") else "left", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        new = before is None or before.part != row.part
        if new and before is not None:
            table.add_section()
        table.add_row(
            row.part if new else "",
            row.what,
            f"{row.value:.2f} {row.unit}",
            row.spread,
            "" if row.bound is None else f"{row.bound:.2f} {row.unit}",
            "" if row.bound is None else "yes" if row.holds else "NO",
            row.note,
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for everything (1)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of export and squeeze (3); verification runs once"
    )
    parser.add_argument("--rounds", type=int, default=80, help="rounds of norms (80)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    machine = f"torch {torch.__version__}, {options.threads} thread(s), {processor()}"
    rows = [row for name in MODELS for row in squeeze_rows(name, options.repeats)]
    rows += [norm_row(shape, how, options.rounds) for shape in NORM_SHAPES for how in NORM_BOUNDS]
    show(rows, machine)
    if options.json is not None:
        numbers = [{**asdict(row), "holds": row.holds} for row in rows]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": numbers}, indent=2) + "\n")
    failed = [row for row in rows if not row.holds]
    for row in failed:
        print(f"does not hold: {row.part}, {row.what}: {row.value:.2f} {row.unit}, at most {row.bound:.2f}")
    return 1 if failed else 0


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
