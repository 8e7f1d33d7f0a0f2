"""CUDA graphs: a small network spends its time on launching kernels; a graph launches those of a whole step at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

WARM_UP = 3  # calls: what is made at the first ones (an optimizer's state, a library's workspace) must not be recorded


@cache
def _stream() -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream()


class Replayed:
    """A function of tensors that returns nothing: called as it is at first, then recorded once, and from then replayed.

    All that it reads and writes, but for its arguments, must stay where it is in memory; numbers that it takes from
    Python, such as a learning rate, stay as they were when it was recorded. So one is made for every epoch.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._calls = 0
        self._arguments: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Tensor) -> None:
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._aside(lambda: self._function(*arguments))
        if self._graph is None:
            self._arguments = [argument.clone() for argument in arguments]
            self._aside(self._record)
        assert self._graph is not None
        for place, argument in zip(self._arguments, arguments, strict=True):
            place.copy_(argument)
        self._graph.replay()

    def _record(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the graph of the epoch before
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin()
        try:
            self._function(*self._arguments)
        finally:
            self._graph.capture_end()

    def _aside(self, work: Callable[[], None]) -> None:
        """On a stream of its own, as recording must be, and as all that is recorded must have been before."""
        aside = _stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
