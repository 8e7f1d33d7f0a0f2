"""What the layers need: shapes by the numbers they keep, indices and counts in range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import (
    INDEXED,
    PLACED,
    Constant,
    NarrowMultiheadAttention,
    Shift,
)
from ..modules.state import CompensatedNorm
from ..record import Structure
from .archive import Misfit
from .network import Slot, join, widest
from .standins import STAND_INS

_INDEXED, _PLACED = tuple(INDEXED.values()), tuple(PLACED.values())
_BY_INDEX = ("index", "place")

Shape = tuple[int | None, ...]  # None: any extent


def fits(module: nn.Module) -> bool:
    """Whether a layer's tensors are what its numbers say. A user's subclass may keep other things under these names."""
    own = {**module._parameters, **module._buffers}
    return all(_matches(tensor.shape, shape) for n, shape in _needs(module) if (tensor := own.get(n)) is not None)


def check_tensor(slot: Slot, tensor: Tensor, *, exact: bool) -> None:
    """That a stored tensor can stand here: `exact`ly what the layer needs, or else no larger than what is there."""
    old, shape, where = slot.tensor, [*tensor.shape], slot.full_name
    need = dict(_needs(slot.module)).get(slot.name) if exact else None
    if need is not None:
        if not _matches(tensor.shape, need):
            wanted = str([*need]).replace("None", "*")
            raise Misfit(f"its shape is {shape}, {type(slot.module).__name__} needs {wanted}", where)
    elif old is None:
        if slot.is_parameter or slot.is_persistent:
            raise Misfit("the model has no such parameter or buffer", where)
    elif len(shape) != old.dim() or (slot.is_persistent and any(n > o for n, o in zip(shape, old.shape, strict=True))):
        raise Misfit(f"its shape is {shape}, that in the full-size model {[*old.shape]}", where)
    _check_dtype(slot, tensor.dtype)
    if isinstance(slot.module, CompensatedNorm) and slot.name == "statistics":
        _check_statistics(tensor, slot.module.statistics, where)


def _check_statistics(tensor: Tensor, old: Tensor, where: str) -> None:
    fits = tensor.shape == old.shape and bool(tensor.isfinite().all())
    if not fits or tensor[0] < 0 or tensor[-1] < 0:  # a count, and a sum of squares
        raise Misfit(f"no channels that were removed give {tensor.tolist()}", where)


def _check_dtype(slot: Slot, dtype: torch.dtype) -> None:
    old = slot.tensor
    if isinstance(slot.module, _INDEXED) and slot.name in _BY_INDEX:
        good = dtype is torch.int64
    elif isinstance(slot.module, CompensatedNorm) and slot.name == "statistics":
        good = dtype is torch.float64
    elif old is None:
        good = dtype.is_floating_point or not slot.is_parameter
    else:
        good = dtype == old.dtype or (dtype.is_floating_point and old.is_floating_point())
    if not good:
        raise Misfit(f"{type(slot.module).__name__} cannot compute with {dtype} here", slot.full_name)


def check_module(module: nn.Module, path: str, full: Structure) -> None:
    """What no single tensor shows."""
    own: Any = module
    if isinstance(module, _INDEXED):
        _check_indices(own, path, full)
    elif isinstance(module, CompensatedNorm):
        count, width, most = float(own.count), own.normalized_shape[0], _full_width(path, full)
        if count != int(count) or count + width > most:
            raise Misfit(f"it keeps {width} channels and lost {count:g}, of {most}", path)
    elif isinstance(module, NarrowMultiheadAttention) and own.out_proj.in_features != own._rows[2]:
        raise Misfit(f"its heads write {own._rows[2]} channels, {own.out_proj.in_features} are read", path)
    if isinstance(module, (nn.modules.conv._ConvNd, nn.GroupNorm)):
        groups, widths = (
            (own.num_groups, (own.num_channels,)) if isinstance(module, nn.GroupNorm) else (own.groups, _widths(own))
        )
        if groups < 1 or any(width % groups for width in widths):
            raise Misfit(f"{groups} groups do not divide its channels", path)


def _check_indices(module: Any, path: str, full: Structure) -> None:
    if module.index is not None:
        _check_range(module.index, _full_width(path, full), join(path, "index"))
    if type(module) in _PLACED:
        if module.place is None or module.fill is None:
            raise Misfit(f"{type(module).__name__} does not say where its outputs go", path)
        _check_range(module.place, _widths(module)[1] + len(module.fill), join(path, "place"))
    elif module.index is None:
        raise Misfit(f"{type(module).__name__} does not say which inputs it gathers", path)


def _check_range(index: Tensor, most: int, where: str) -> None:
    low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
    if low < 0 or high >= most:
        raise Misfit(f"it reaches from {low} to {high}, there are {most} channels", where)


def _full_width(path: str, full: Structure) -> int:
    """How many channels a layer or norm can have read in the full-size model."""
    was, shape = full["attributes"].get(path, {}), full["parameters"].get(join(path, "weight"), [])
    if full["modules"][path] in STAND_INS:  # even there it was narrower than what it read
        return widest(full)
    return int(was.get("in_features", was.get("in_channels", shape[0] if len(shape) == 1 else widest(full))))


def _widths(module: Any) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.in_channels, module.out_channels


def _matches(shape: torch.Size, need: Shape) -> bool:
    return len(shape) == len(need) and all(want in (None, have) for want, have in zip(need, shape, strict=True))


def _needs(module: Any) -> Iterator[tuple[str, Shape]]:
    """Tensors of a layer of torch, or of one of ours, and their shapes."""
    if isinstance(module, nn.Linear):
        yield from (("weight", (module.out_features, module.in_features)), ("bias", (module.out_features,)))
    elif isinstance(module, nn.modules.conv._ConvNd):
        one, other = module.out_channels, module.in_channels
        one, other = (other, one) if module.transposed else (one, other)
        yield "weight", (one, other // max(module.groups, 1), *module.kernel_size)
        yield "bias", (module.out_channels,)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        yield from ((name, (module.num_features,)) for name in ("weight", "bias", "running_mean", "running_var"))
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        yield from ((name, tuple(module.normalized_shape)) for name in ("weight", "bias"))
    elif isinstance(module, nn.GroupNorm):
        yield from ((name, (module.num_channels,)) for name in ("weight", "bias"))
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield "weight", (module.num_embeddings, module.embedding_dim)
    elif isinstance(module, nn.PReLU):
        yield "weight", (module.num_parameters,)
    elif isinstance(module, nn.RNNBase):
        yield from ((name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False))
    elif isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
        yield from (
            ("in_proj_weight", (3 * width, width)),
            ("in_proj_bias", (3 * width,)),
            ("q_proj_weight", (width, width)),
        )
        yield from (("k_proj_weight", (width, module.kdim)), ("v_proj_weight", (width, module.vdim)))
    elif isinstance(module, NarrowMultiheadAttention):
        yield from (("in_proj_weight", (sum(module._rows), None)), ("in_proj_bias", (sum(module._rows),)))
        yield from ((f"{which}_proj_weight", (rows, None)) for which, rows in zip("qkv", module._rows, strict=True))
    elif isinstance(module, CompensatedNorm):
        yield from ((name, (module._kept,)) for name in ("weight", "bias"))
        yield "statistics", (len(module.statistics),)
    elif isinstance(module, (Shift, Constant)):
        yield "bias" if isinstance(module, Shift) else "value", (None,)
    if isinstance(module, _INDEXED):
        yield from (("index", (_widths(module)[0],)), ("place", (None,)), ("fill", (None,)))
