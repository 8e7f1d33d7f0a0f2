"""Is it faster? Networks side by side: seconds a call, samples a second, bytes."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from .batches import batch_of, one_call, with_batch
from .copies import borrowed
from .errors import InputError
from .masks import bake_masks
from .modules.kernels import usual
from .rehearse import Call
from .unwrap import unwrap
from .verify import map_tensors

_WARM_UP = 3  # calls, before any is timed
_FEWEST, _MOST = 9, 1000  # timed calls


@dataclass(frozen=True)
class Timing:
    """One network at one size of the batch."""

    name: str
    batch: int
    seconds_median: float  # of one call
    seconds_low: float  # a quarter of the calls took less
    seconds_high: float  # a quarter took more
    throughput: float  # samples a second, at the median
    calls: int  # that were timed
    parameter_bytes: int  # parameters and buffers
    peak_bytes: int | None  # the most that one call allocates beside them; None on the CPU, where it is not measured


@dataclass(frozen=True)
class Bench:
    """What `bench` measured. Prints as a table."""

    device: str
    dtype: str
    threads: int
    batch: int
    rows: tuple[Timing, ...]

    def speedup(self, batch: int | None = None) -> float:
        """How many times faster the last network is than the first one."""
        rows = [row for row in self.rows if row.batch == (self.batch if batch is None else batch)]
        return rows[0].seconds_median / rows[-1].seconds_median

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(self.__rich__())
        return console.export_text().rstrip()

    def __rich__(self) -> Table:
        table = Table(
            "", "batch", "ms a call", "quartiles", "samples/s", "faster", "MB", "peak MB", box=box.SIMPLE_HEAD
        )
        for column in table.columns[1:]:
            column.justify = "right"
        first = {row.batch: row for row in reversed(self.rows)}
        for row in self.rows:
            low, high = (f"{1e3 * seconds:.3g}" for seconds in (row.seconds_low, row.seconds_high))
            table.add_row(
                row.name,
                str(row.batch),
                f"{1e3 * row.seconds_median:.3g}",
                f"{low} to {high}",
                f"{row.throughput:,.0f}" if row.throughput >= 100 else f"{row.throughput:.3g}",
                f"{first[row.batch].seconds_median / row.seconds_median:.2f}x",
                f"{row.parameter_bytes / 1e6:,.2f}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.2f}",
            )
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.device == "cpu" else ""
        unknown = "; peak memory is not measured on the CPU" if self.device == "cpu" else ""
        table.caption = f"{self.device}, {self.dtype}{threads}{unknown}"
        return table


def bench(
    models: Mapping[str, nn.Module] | Sequence[nn.Module],
    example_inputs: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    seconds: float = 2.0,
) -> Bench:
    """Time networks on the same inputs, taking turns, so that a busy machine slows all of them alike.

    In eval mode and without gradients, at the batch of the example and at 1 (where all of them take that), with masks
    as plain zeros. The networks themselves are left as they are.

    Args:
        models: by name, or a pair of which the first is called "before" and the second "after".
        example_inputs: a tensor or a tuple of arguments; `kwargs` go with them.
        device: where to; by default where the first network is.
        seconds: how long to measure each network at each size. At least 9 calls are timed.
    """
    named = _named(models)
    call = one_call(example_inputs, kwargs, of="bench")
    where = torch.device(device) if device is not None else _device_of(next(iter(named.values())))
    with ExitStack() as stack:
        ready = {name: stack.enter_context(_ready(model, where)) for name, model in named.items()}
        stack.enter_context(torch.no_grad())
        call = map_tensors(call, lambda tensor: tensor.to(where))
        _check(ready, call)
        batch, alone = batch_of(call), with_batch(call, 1)
        calls = [call, alone] if batch > 1 and _runs(ready, alone) else [call]
        rows = [row for each in calls for row in _measure(ready, each, where, seconds)]
        dtype = next((p.dtype for p in next(iter(ready.values())).parameters()), torch.get_default_dtype())
    name = f"{where} {torch.cuda.get_device_name(where)}" if where.type == "cuda" else str(where)
    return Bench(name, str(dtype).removeprefix("torch."), torch.get_num_threads(), batch, tuple(rows))


def _named(models: Mapping[str, nn.Module] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    named = dict(models) if isinstance(models, Mapping) else dict(zip(("before", "after"), models, strict=False))
    if not named or len(named) != len(models):
        raise InputError(
            f"{len(models)} models without names" if models else "there are no models",
            where="bench(models, ...)",
            consequence="nothing was measured",
            remedy="pass a dict of names and models, or a pair: before and after",
        )
    return named


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


@contextmanager
def _ready(model: nn.Module, where: torch.device) -> Iterator[nn.Module]:
    with borrowed(unwrap(model)) as network:
        bake_masks(network)
        yield network.eval().to(where)


def _check(networks: dict[str, nn.Module], call: Call) -> None:
    for name, network in networks.items():
        try:
            network(*call[0], **call[1])
        except Exception as cause:
            first = (str(cause).splitlines() or [""])[0]
            raise InputError(
                f"{name} does not run on the example inputs: {type(cause).__name__}: {first}",
                where="bench(models, example_inputs)",
                consequence="nothing was measured",
                remedy="pass inputs that all networks take",
            ) from cause


def _runs(networks: dict[str, nn.Module], call: Call) -> bool:
    try:
        _check(networks, call)
    except InputError:
        return False
    return True


def _measure(networks: dict[str, nn.Module], call: Call, where: torch.device, seconds: float) -> list[Timing]:
    usual.wait()  # what is built beside first calls
    for network in networks.values():
        for _ in range(_WARM_UP):
            _seconds(network, call, where)
    took: dict[str, list[float]] = {name: [] for name in networks}
    end = time.perf_counter() + seconds * len(networks)
    for turn in range(_MOST):
        if turn >= _FEWEST and time.perf_counter() >= end:
            break
        order = list(networks) if turn % 2 == 0 else list(reversed(networks))  # nobody always follows the same one
        for name in order:
            took[name].append(_seconds(networks[name], call, where))
    return [_timing(name, took[name], networks[name], call, where) for name in networks]


def _seconds(network: nn.Module, call: Call, where: torch.device) -> float:
    start = time.perf_counter()
    network(*call[0], **call[1])
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - start


def _timing(name: str, took: list[float], network: nn.Module, call: Call, where: torch.device) -> Timing:
    low, median, high = statistics.quantiles(took, n=4, method="inclusive")
    size, held = batch_of(call), {id(t): t.nbytes for t in [*network.parameters(), *network.buffers()]}
    peak = _peak(network, call, where) if where.type == "cuda" else None
    return Timing(name, size, median, low, high, size / median, len(took), sum(held.values()), peak)


def _peak(network: nn.Module, call: Call, where: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    network(*call[0], **call[1])
    torch.cuda.synchronize(where)
    return int(torch.cuda.max_memory_allocated(where) - before)
