"""Our own modules in a stored network: described as plain numbers, and made again from them in a full-size model.

Nothing is looked up by a name that a file gives, except in the table `STAND_INS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..modules import (
    INDEXED,
    PLACED,
    CompensatedGroupNorm,
    CompensatedLayerNorm,
    CompensatedRMSNorm,
    CompensatedStdNorm,
    Constant,
    NarrowMultiheadAttention,
    Passthrough,
    Shift,
    can_index,
)
from ..modules.state import CompensatedNorm, state_of
from ..rewrite import inherit
from .archive import Misfit

_LAYERS = {kind.__name__: kind for kind in (*INDEXED.values(), *PLACED.values())}
_NUMBERS: Mapping[type[nn.Module], tuple[str, ...]] = {
    CompensatedLayerNorm: ("eps", "channel_dim", "normalized_shape"),
    CompensatedGroupNorm: ("eps", "channel_dim", "normalized_shape"),
    CompensatedStdNorm: ("eps", "channel_dim", "normalized_shape"),
    CompensatedRMSNorm: ("eps", "channel_dim", "normalized_shape", "weight_offset"),
    Passthrough: ("outputs",),
    Shift: ("outputs", "channel_dim"),
    Constant: ("outputs", "channel_dim"),
    NarrowMultiheadAttention: ("num_heads", "head_dim", "v_head_dim", "scale"),
}
_FLOATS = {"eps", "scale", "weight_offset"}
STAND_INS = {kind.__name__: kind for kind in _NUMBERS} | _LAYERS
PLAIN = {kind.__name__: kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}  # for one whose weight is computed
MOST_OUTPUTS = 64  # of a block: what forward returns is a tuple so long


def takes_over(kind: type[nn.Module]) -> bool:
    """Whether a stand-in keeps the attributes of the module that it stands for."""
    return kind.__name__ in _LAYERS | PLAIN or kind is NarrowMultiheadAttention


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The numbers from which `make` makes it again; its tensors not counted."""
    kind = type(module)
    numbers = {name: getattr(module, name) for name in _NUMBERS.get(kind, ())}
    for name in _FLOATS & numbers.keys():
        numbers[name] = None if numbers[name] is None else float(numbers[name])
    if isinstance(module, CompensatedNorm):
        numbers["normalized_shape"] = module.normalized_shape[0]
    if kind in PLACED.values():
        numbers["trained"] = isinstance(module.fill, nn.Parameter)
    return {"class": kind.__name__, **numbers}


def make(old: nn.Module, description: Mapping[str, Any], widest: int, where: str) -> nn.Module:
    """The stand-in for a module of the full-size model, its own tensors still to be filled in."""
    numbers = {**description}
    name = numbers.pop("class", None)
    kind = (STAND_INS | PLAIN).get(name) if isinstance(name, str) else None
    if kind is None:
        raise Misfit(f"{name!r} is no class that a stored network may use", where)
    wanted = {*_NUMBERS.get(kind, ()), *(["trained"] if kind in PLACED.values() else [])}
    if numbers.keys() != wanted:
        raise Misfit(f"a {name} has the numbers {sorted(wanted)}, not {sorted(numbers)}", where)
    for number, value in numbers.items():
        if not _allowed(number, value, kind, widest):
            raise Misfit(f"{number} of a {name} cannot be {value!r}", where)
    if name in PLAIN:
        return _plain(old, kind, where)
    if name in _LAYERS:
        return _layer(old, kind, numbers.get("trained"), where)
    if kind is NarrowMultiheadAttention:
        if not isinstance(old, (nn.MultiheadAttention, NarrowMultiheadAttention)):
            raise Misfit(f"a {name} cannot stand for a {type(old).__name__}", where)
        return NarrowMultiheadAttention(old, **numbers)
    return inherit(
        _norm(old, kind, numbers, where) if issubclass(kind, CompensatedNorm) else _block(old, kind, numbers), old
    )


def _allowed(name: str, value: Any, kind: type[nn.Module], most: int) -> bool:
    if name in _FLOATS:
        as_torch = name == "eps" and kind is CompensatedRMSNorm and value is None
        return as_torch or (type(value) is float and math.isfinite(value))
    if name == "channel_dim":
        return type(value) is int and value in (-1, 1)
    if name == "trained":
        return type(value) is bool
    low, high = (0, MOST_OUTPUTS) if name == "outputs" else (1, most)
    return type(value) is int and low <= value <= high


def _layer(old: nn.Module, kind: type[nn.Module], trained: bool | None, where: str) -> nn.Module:
    bases = [base for base, indexed in INDEXED.items() if issubclass(kind, indexed)]
    if not can_index(old) or not isinstance(old, bases[0]):
        raise Misfit(f"a {kind.__name__} cannot stand for a {type(old).__name__}", where)
    new = kind.__new__(kind)
    vars(new).update(state_of(old))
    if "index" not in new._buffers:
        new.register_buffer("index", None)
    if trained is not None and "place" not in new._buffers:
        new.register_buffer("place", None)
        (new.register_parameter if trained else new.register_buffer)("fill", None)
    return new


def _plain(old: nn.Module, kind: type[nn.Module], where: str) -> nn.Module:
    if not isinstance(old, kind):
        raise Misfit(f"a {kind.__name__} cannot stand for a {type(old).__name__}", where)
    new = kind.__new__(kind)
    vars(new).update(state_of(old))
    new._parameters = {name: old._parameters.get(name) for name in ("weight", "bias")}  # a gain is in the weight now
    new._buffers = {}
    return new


def _norm(old: nn.Module, kind: type[nn.Module], numbers: dict[str, Any], where: str) -> nn.Module:
    own = dict(old.named_parameters(recurse=False))
    if own.keys() - {"weight", "bias"} or any(parameter.dim() != 1 for parameter in own.values()):
        raise Misfit(f"a {kind.__name__} cannot stand for a {type(old).__name__}", where)
    kept = numbers.pop("normalized_shape")
    # At width 1: what a file says is not to be allocated.
    new = kind(1, elementwise_affine=False, device=device_of(old), **numbers)
    for name in ("weight", "bias") if kind is not CompensatedRMSNorm else ("weight",):
        new.register_parameter(name, own.get(name))
    for name, child in old.named_children():
        new.add_module(name, child)
    vars(new)["_kept"] = kept  # its weight is still the full-size one
    return new


def _block(old: nn.Module, kind: type[nn.Module], numbers: dict[str, Any]) -> nn.Module:
    return kind(**numbers) if kind is Passthrough else kind(torch.zeros(1, device=device_of(old)), **numbers)


def device_of(module: nn.Module) -> torch.device | None:
    like = next(module.parameters(), None)
    return None if like is None else like.device
