"""Memory and time of squeezing Llama-shaped models in place, up to 1B parameters; exit code 1 if a bound fails.

    python benchmarks/llama_scale.py [--sizes 125M 400M 1B] [--dtype float32] [--tied] [--out DIR]

Random weights. Dead: 30% of the MLP channels, two heads a layer (two query heads and the key-value head they share)
and 5% of the residual stream (all that writes those channels is 0 there). Each size runs in a process of its own, which
first squeezes a tiny model, so that what torch.export imports does not count.
  model      bytes of the parameters and buffers
  peak       the highest resident memory during `squeeze(inplace=True, verify=False)`, less what the process held just
             before it, in models: 1.3 means that 0.3 models were needed beside the model itself. The bound is on the
             largest model: some 60 MB are graphs and labels, and a tenth of a small one
  cpu        seconds of processor time, on one thread: other work on the machine does not count
  steps      cpu seconds by step of squeeze; `first trace` is one eager run and one torch.export, which no size escapes
Time is linear if cpu seconds a million parameters do not grow from one size to the next by more than the bound allows.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MOST_MEMORY = 1.3  # of the model's own bytes
MOST_GROWTH = 1.25  # of the seconds a million parameters, from the smallest size to the largest
TOKENS = 16
STEPS = {
    "first trace": ("squeeze", "trace"),
    "analyse": ("squeeze", "analyse"),
    "training": ("squeeze", "feeds_training_branches"),
    "fit": ("squeeze", "fit"),
    "trial trace": ("follow", "trace"),
    "rewrite": ("squeeze", "carry_out"),
    "report": ("squeeze", "make_report"),
}


@dataclass(frozen=True)
class Shape:
    """A query head is 64 wide, and two of them share a key-value head."""

    hidden: int
    inner: int
    layers: int
    vocab: int = 32000


SHAPES = {
    "tiny": Shape(128, 320, 2, 100),
    "125M": Shape(768, 2048, 12),
    "400M": Shape(1280, 3456, 18),
    "1B": Shape(2048, 5632, 20),
}


@dataclass
class Row:
    size: str
    dtype: str
    params_before: int
    params_after: int
    planted: int  # parameters that only serve what is dead
    model_mb: float
    peak_mb: float  # above what the process held before
    memory: float  # (model + peak) / model
    seconds: float
    cpu_seconds: float
    cpu_per_million: float
    steps: dict[str, float] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ one size, one process


def build(shape: Shape, dtype: str, tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.hidden // 64
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # so that a float32 model never exists beside a bfloat16 one
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def plant(model: Any, shape: Shape) -> int:
    """Zero weights; returns how many parameters only serve what is dead now."""
    import torch

    generator = torch.Generator().manual_seed(1)
    size = sum(parameter.numel() for parameter in model.parameters())

    def some(total: int, count: int) -> Any:
        return torch.randperm(total, generator=generator)[:count]

    stream = some(shape.hidden, shape.hidden // 20)
    inner, heads = round(0.3 * shape.inner), shape.hidden // 64
    with torch.no_grad():
        model.model.embed_tokens.weight[:, stream] = 0
        for layer in model.model.layers:
            mlp, attention = layer.mlp, layer.self_attn
            dead = some(shape.inner, inner)
            for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
                weight[dead] = 0
            mlp.down_proj.weight[:, dead] = 0
            group = int(some(heads // 2, 1))
            queries, keys = slice(128 * group, 128 * group + 128), slice(64 * group, 64 * group + 64)
            attention.q_proj.weight[queries] = 0
            attention.k_proj.weight[keys] = 0
            attention.v_proj.weight[keys] = 0
            attention.o_proj.weight[:, queries] = 0
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight[stream] = 0
    width, rows = shape.hidden - len(stream), shape.inner - inner
    queries_left = shape.hidden - 128
    layer = width * (3 * rows + 3 * queries_left) + 2 * width
    tables = 1 if model.config.tie_word_embeddings else 2
    return size - (tables * shape.vocab * width + shape.layers * layer + width)


def measure(size: str, dtype: str, tied: bool) -> Row:
    import conftest  # noqa: F401  makes torchvision importable, which transformers may want
    import torch

    import squeeze_release as sr

    torch.set_num_threads(1)
    warm = build(SHAPES["tiny"], dtype, tied)
    plant(warm, SHAPES["tiny"])
    sr.squeeze(warm, torch.arange(TOKENS)[None], inplace=True, verify=False)
    del warm
    shape = SHAPES[size]
    model = build(shape, dtype, tied)
    planted = plant(model, shape)
    before = sum(parameter.numel() for parameter in model.parameters())
    bytes_held = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    gc.collect()
    with timed(STEPS) as steps, Peak() as peak:
        started, started_cpu = time.perf_counter(), time.process_time()
        _, report = sr.squeeze(model, torch.arange(TOKENS)[None], inplace=True, verify=False)
        seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu - peak.cost
    steps["fit"] = round(steps["fit"] - steps["trial trace"], 2)
    return Row(
        size=size + (" tied" if tied else ""),
        dtype=dtype,
        params_before=before,
        params_after=report.params_after,
        planted=planted,
        model_mb=round(bytes_held / 2**20, 1),
        peak_mb=round(peak.above / 2**20, 1),
        memory=round(1 + peak.above / bytes_held, 3),
        seconds=round(seconds, 2),
        cpu_seconds=round(cpu, 2),
        cpu_per_million=round(cpu / before * 1e6, 5),
        steps=steps,
    )


@contextmanager
def timed(steps: dict[str, tuple[str, str]]) -> Iterator[dict[str, float]]:
    """Seconds spent in each of these functions of the package, while the block lasts."""
    spent = dict.fromkeys(steps, 0.0)
    undo = []

    def clocked(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[step] = round(spent[step] + time.thread_time() - started, 2)

        return run

    for step, (module, name) in steps.items():
        home = import_module(f"squeeze_release.{module}")
        undo.append((home, name, getattr(home, name)))
        setattr(home, name, clocked(step, getattr(home, name)))
    try:
        yield spent
    finally:
        for home, name, function in undo:
            setattr(home, name, function)


class Peak:
    """The highest resident memory of this process while the block lasts, above what it held when the block began."""

    def __enter__(self) -> Peak:
        self.above, self.cost, self._stop = 0, 0.0, threading.Event()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's own high-water mark starts anew
            self._exact = _status("VmHWM") < _status("VmRSS") + 2**20
        except OSError:
            self._exact = False
        self._base = _status("VmRSS")
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        if self._exact:
            self.above = max(0, _status("VmHWM") - self._base)

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.above = max(self.above, _status("VmRSS") - self._base)
            self.cost = time.thread_time()


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


# ---------------------------------------------------------------------------------------------------------- all of them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["125M", "400M", "1B"], choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tied", action="store_true", help="one table for embedding and output")
    parser.add_argument("--out", type=Path, help="folder for a CSV")
    parser.add_argument("--one", choices=SHAPES, help=argparse.SUPPRESS)  # the process of one size
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(measure(given.one, given.dtype, given.tied))))
        return 0
    rows = [_in_own_process(size, given.dtype, given.tied) for size in given.sizes]
    show(rows)
    if given.out:
        write(rows, given.out / f"{given.dtype}{'-tied' if given.tied else ''}.csv")
    growth = rows[-1].cpu_per_million / rows[0].cpu_per_million
    most = rows[-1].memory
    print(
        f"largest: {most:.2f} models (bound {MOST_MEMORY}); time a parameter grows {growth:.2f}x (bound {MOST_GROWTH})"
    )
    return int(most > MOST_MEMORY or growth > MOST_GROWTH)


def _in_own_process(size: str, dtype: str, tied: bool) -> Row:
    command = [sys.executable, __file__, "--one", size, "--dtype", dtype, *(["--tied"] if tied else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "size", "parameters", "after", "of planted", "model MB", "peak MB", "memory", "s", "cpu s", "cpu s / M", "steps"
    )
    for row in rows:
        removed = (row.params_before - row.params_after) / row.planted
        steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.steps.items())
        numbers = (f"{row.params_before:,}", f"{row.params_after:,}", f"{removed:.1%}", f"{row.model_mb:,.0f}")
        memory = (f"{row.peak_mb:,.0f}", f"{row.memory:.2f}x")
        times = (f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}", f"{row.cpu_per_million:.4f}")
        table.add_row(f"{row.size} {row.dtype}", *numbers, *memory, *times, steps)
    Console(width=200).print(table)


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = [{key: value for key, value in asdict(row).items() if key != "steps"} | row.steps for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, flat[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


if __name__ == "__main__":
    sys.exit(main())
