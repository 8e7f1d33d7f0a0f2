"""Seconds of functions that take turns, so that a busy or a hot machine slows all of them alike."""

from __future__ import annotations

import csv
import platform
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        return cls(low, median(values), high)


def interleaved(
    functions: dict[str, Callable[[], Any]], on_gpu: bool, rounds: int, sample_seconds: float
) -> dict[str, list[float]]:
    """Seconds of a call, for each function one number a round. Each number is the mean of calls back to back.

    They come in another order each round, and a call that does not count goes first: who comes after himself, or after
    a large network, would find another cache.
    """
    calls = {}
    for name, function in functions.items():
        sample(function, on_gpu, 1)
        calls[name] = max(1, round(sample_seconds / sample(function, on_gpu, 2)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    shuffled, order = random.Random(0), list(functions)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            functions[name]()
            times[name].append(sample(functions[name], on_gpu, calls[name]))
    return times


def sample(function: Callable[[], Any], on_gpu: bool, calls: int) -> float:
    """By CUDA events on a GPU: what the device, or the host that feeds it, needs for a call."""
    if not on_gpu:
        started = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - started) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph: what is left is the device's own time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def replay() -> None:
        graph.replay()

    replay.__dict__["kept"] = function, kept  # what the graph reads and what it writes
    return replay


def machine() -> str:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        device = names[0] if names else platform.processor()
    return f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads"


def append(path: Path, row: dict[str, Any]) -> None:
    """One more row, on disk at once: a run that is stopped loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def rows_of(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    if not rows:
        return "(no rows)"
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows])
