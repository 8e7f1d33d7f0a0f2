"""The shortest way to a kernel of CompensatedLayerNorm: whether tensors are like some seen before is one question.

Between two large layers all that Python touches comes from main memory, and to ask a tensor for an attribute costs as
much as the arithmetic of some rows. torch's compiler has the same question before every call of what it has compiled,
and a quick answer: `TensorGuards`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled, nn
from torch.autograd import forward_ad

from . import fused, native, rows, usual
from .inputs import Kernels, Parameter, address_of, count_modes, like, nobody_watches_eager, readable

_MISSING: Any = object()
_MOST = 16  # kinds of inputs of one width: shapes, devices, dtypes, with gradients and without


class Seen(NamedTuple):
    """Tensors like these, of the same classes, dtypes and widths, on the same device; and the kernels for them.

    On a GPU, where less is computed in the time that Python takes, they have the same shape and strides too.
    """

    same: Callable[[Tensor, Parameter, Parameter], bool]
    tracked: bool  # one of them requires a gradient
    kernels: Kernels


# By width, and whether of images; norms of one kind share kernels, and how to tell that they fit. The latest are first.
_seen: dict[tuple[int, bool], tuple[Seen, ...]] = {}


def normalize(x: Tensor, norm: dict[str, Any], image: bool) -> Tensor | None:
    """y; or None where there is no kernel: they are for plain tensors, in eager.

    norm: what a CompensatedLayerNorm has. image: x has four dimensions, and its channels are the second of them; else
    they are the last.
    """
    if norm["_buffers"]["statistics"] is not norm["_known"]:  # functional_call has put others in their place
        return None
    if x.is_nested:  # which ends the process in TensorGuards
        return None
    parameters, removed, kept = norm["_parameters"], norm["_numbers"], norm["_kept"]
    kind = kept, image
    # None is no parameter, and missing is one that is made elsewhere: of a parametrized norm.
    weight, bias = parameters.get("weight", _MISSING), parameters.get("bias", _MISSING)
    all_seen = _seen  # of now: who forgets puts another in its place, and what is written here is forgotten too
    before = all_seen.get(kind, ())
    for place, seen in enumerate(before):
        if seen.same(x, weight, bias):
            if place > 3:
                all_seen[kind] = (seen, *before[:place], *before[place + 1 :])
            break
    else:
        found = _look(x, weight, bias, kept, image)
        if found is None:
            return None
        # As a whole: another thread may look at the same time.
        seen, all_seen[kind] = found, (found, *before[: _MOST - 1])
    if count_modes() or forward_ad._current_level >= 0:
        return None
    _, tracked, (plain, differentiable) = seen
    if tracked and is_grad_enabled():
        return None if differentiable is None else differentiable[removed](x, weight, bias)
    return None if plain is None else plain(x, weight, bias, removed)


_normalize = normalize


def begin() -> None:
    """To build or load what is in C++, as the first call on a GPU does, and many on a CPU."""
    usual.begin(_shorten)


def _shorten(in_cpp: Any) -> None:
    """From now on C++ has the usual case, and comes to `_normalize` with all others."""
    global normalize
    _forget_ways()
    normalize = in_cpp.normalize_with(globals())


def forget() -> None:
    """All that was seen and made, for who changes how kernels are made."""
    _forget_ways()
    rows._kernels.clear()


def _forget_ways() -> None:
    """But not what is known of kernels."""
    global _seen
    _seen = {}
    rows._rows.cache_clear()
    fused._function.cache_clear()


def _look(x: Tensor, weight: Parameter, bias: Parameter, kept: int, image: bool) -> Seen | None:
    """None, and so a look at every call, of what is rare: other classes, one tensor for both parameters."""
    if not nobody_watches_eager():
        return None
    if not readable(x, x.get_device()) or not x.dim() or x.size(1 if image else -1) != kept:
        return None
    for parameter in (weight, bias):
        if parameter is not None and not (parameter.__class__ is nn.Parameter and address_of(parameter)):
            return None
    kernels, in_cpp = Kernels(None, None), usual.compiled()
    same = like(x, weight, bias, channels=None if x.is_cuda else 1 if image else -1, in_cpp=in_cpp)
    if same is None:
        return None
    if x.is_cpu:
        kernels = Kernels(native.kernel(x, weight, bias, image, in_cpp, begin), None)
    elif x.is_cuda:
        kernels = fused.kernels(x, weight, bias, image)
        if kernels.plain is not None:
            begin()
    if usual.compiled() is not in_cpp:  # which was built meanwhile, and these would be without it
        return None
    tracked = any(each is not None and each.requires_grad for each in (x, weight, bias))
    return Seen(same, tracked, kernels)
