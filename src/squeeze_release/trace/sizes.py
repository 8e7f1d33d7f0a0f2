"""Does a model take inputs of another size than the example's, and what does it do with them?

Code that pads to a multiple pads nothing where the example fits. At another size it may, and then what is constant here
is not. A model that refuses every other size (timm's Swin does) never gets there. Where the padding is behind an `if`,
as in transformers' Swin, a trace of the example does not even show it: one of a size that pads does.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..copies import borrowed
from ..rehearse import Call, Rehearsal, runs

_MOST_PATHS = 3
_STEPS = 64  # sizes differ by the powers of 2 up to this: by what networks divide them by
_PADS = ("pad", "constant_pad_nd")  # what else code does to fit a size, cutting and resampling, leaves constants alone


def takes_other_sizes(model: nn.Module, calls: list[Call]) -> bool:
    """Whether it runs on the example at any other size; True also where this cannot be tried.

    Tried is 1, n + d and n - d for every divisor d of the sizes n, along each dimension but the first and along several
    of them alike: that finds whatever bounds them or must divide them. One size that is named in the code beside the
    example's own is not found.
    """
    shapes = [_only_shape(call) for call in calls]
    if len(set(shapes)) != 1 or shapes[0] is None:
        return True
    with _quietly(model, calls) as trial:
        return any(trial.runs(_resized(call, other)) for other in _other_shapes(shapes[0]) for call in calls)


def other_paths(model: nn.Module, calls: list[Call]) -> list[Call]:
    """Examples of other sizes, at which the code of some module pads that does not at the example's own.

    Tried are images some powers of 2 larger and smaller, where one is all that comes in.
    """
    shape = _only_shape(calls[0])
    if shape is None or len(shape) < 4:
        return []
    with _quietly(model, calls) as trial:
        known = set().union(*(trial.padding(call) for call in calls))
        alone = _resized(calls[0], (1, *shape[1:]))  # one sample shows as much
        example = alone if trial.runs(alone) else calls[0]
        found = {other: trial.padding(_resized(example, (None, *other[1:]))) for other in _near(shape)}
    result: list[Call] = []
    while found and len(result) < _MOST_PATHS:
        best = max(found, key=lambda other: len(found[other] - known))
        more = found.pop(best)
        if more <= known:
            break
        known |= more
        result.append(_resized(calls[0], best))
    return result


@contextmanager
def _quietly(model: nn.Module, calls: list[Call]) -> Iterator[_Trial]:
    """A copy in eval mode, to try things with."""
    with borrowed(model) as copy, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield _Trial(copy.eval(), Rehearsal(copy, calls))


@dataclass(frozen=True)
class _Trial:
    model: nn.Module
    rehearsal: Rehearsal

    def runs(self, call: Call) -> bool:
        return self.rehearsal.allows(call) and runs(self.model, call)

    def padding(self, call: Call) -> set[str]:
        """The modules that pad; none where the model does not run."""
        if not self.rehearsal.allows(call):
            return set()
        watch = _Watch(self.model)
        try:
            with watch:
                return watch.found if runs(self.model, call) else set()
        finally:
            for handle in watch.handles:
                handle.remove()


def _near(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    common = math.gcd(_STEPS, *shape[2:])
    steps = [sign * n for n in range(1, common + 1) if common % n == 0 for sign in (-1, 1)]
    shapes = [(*shape[:2], *(size + step for size in shape[2:])) for step in steps]
    return [other for other in shapes if all(2 * new >= old for new, old in zip(other, shape, strict=True))]


class _Watch(TorchFunctionMode):
    """The code of which modules pads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside, self.found = [""], set[str]()
        self.handles = []
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self.handles.append(module.register_forward_hook(self._leave))

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self.inside.append(name)

    def _leave(self, *_: object) -> None:
        self.inside.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _PADS:
            self.found.add(self.inside[-1])
        return func(*args, **(kwargs or {}))


def _only_shape(call: Call) -> tuple[int, ...] | None:
    """That of the only tensor that comes in, if it holds numbers."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if len(tensors) != 1 or not tensors[0].is_floating_point() or 0 in tensors[0].shape:
        return None
    return tuple(tensors[0].shape)


def _other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    dims = range(1, len(shape))
    for count in reversed(dims):  # mostly all positions change together
        for which in itertools.combinations(reversed(dims), count):
            common = math.gcd(*(shape[d] for d in which))
            for step in [s for n in range(1, common + 1) if common % n == 0 for s in (-n, n)]:
                alike = [{d: shape[d] + step for d in which}, {d: shape[d] + shape[d] * step // common for d in which}]
                for new in alike if alike[0] != alike[1] else alike[:1]:
                    if min(new.values()) > 0:
                        yield tuple(new.get(d, size) for d, size in enumerate(shape))
            if any(shape[d] > 1 for d in which):
                yield tuple(1 if d in which else size for d, size in enumerate(shape))


def _resized(call: Call, shape: tuple[int | None, ...]) -> Call:
    """The example cut, or repeated from the start; None leaves a dimension as it is."""

    def resized(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        for dim, size in enumerate(shape):
            if size is not None:
                value = value.index_select(dim, torch.arange(size, device=value.device) % value.size(dim))
        return value

    args, kwargs = pytree.tree_map(resized, call)
    return args, kwargs
