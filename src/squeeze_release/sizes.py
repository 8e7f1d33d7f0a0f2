"""Does a model take inputs of another size than the example's?

Code that pads to a multiple pads nothing where the example fits. At another size it may, and then what is constant here
is not. A model that refuses every other size (timm's Swin does) never gets there.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .copies import borrowed
from .verify import Call


def takes_other_sizes(model: nn.Module, calls: list[Call]) -> bool:
    """Whether it runs on the example at any other size; True also where this cannot be tried.

    Tried is 1, n + d and n - d for every divisor d of the sizes n, along each dimension but the first and along several
    of them alike: that finds whatever bounds them or must divide them. One size that is named in the code beside the
    example's own is not found.
    """
    shapes = [_only_shape(call) for call in calls]
    if len(set(shapes)) != 1 or shapes[0] is None:
        return True
    with borrowed(model) as copy, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy.eval()
        return any(_runs(copy, call, other) for other in _other_shapes(shapes[0]) for call in calls)


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


def _runs(model: nn.Module, call: Call, shape: tuple[int, ...]) -> bool:
    def resized(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        for dim, size in enumerate(shape):
            places = torch.arange(size, device=value.device) % value.size(dim)
            value = value.index_select(dim, places)
        return value

    args, kwargs = pytree.tree_map(resized, call)
    try:
        model(*args, **kwargs)
    except Exception:
        return False
    return True
