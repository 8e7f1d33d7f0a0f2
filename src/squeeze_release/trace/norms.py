"""Norms as single ops: while the model is traced, every layer norm and RMS norm module shows up as one node.

A norm is recognised by what it does, not by its name: a module with a 1-d weight, or with none and a
`normalized_shape`, that on random inputs equals F.layer_norm, F.rms_norm or x / std(x), over the last dimension or over
dimension 1, or F.group_norm with one group. Modules inside it that hold no numbers, such as an activation, are run
behind the norm if that is what it does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules import CompensatedGroupNorm, CompensatedLayerNorm, CompensatedRMSNorm, CompensatedStdNorm
from ..modules.state import CompensatedNorm, behind

_library = torch.library.Library("squeeze_release", "DEF")
_library.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, int channel_dim, float eps, float removed, "
    "float removed_mean, float removed_m2, bool positions) -> Tensor"
)
_library.define(
    "rms_norm(Tensor x, Tensor? weight, int channel_dim, float? eps, float weight_offset, float removed, "
    "float removed_squares) -> Tensor"
)
_library.define(
    "std_norm(Tensor x, Tensor? weight, int channel_dim, float eps, float removed, float removed_mean, "
    "float removed_m2) -> Tensor"
)


def _fake_norm(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


# The plain formulas: they run once, when the example inputs are tried.


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    channel_dim: int,
    eps: float,
    removed: float,
    removed_mean: float,
    removed_m2: float,
    positions: bool,
) -> Tensor:
    x = x.movedim(channel_dim, -1)
    total, where = x.size(-1) + removed, tuple(range(1, x.dim() - 1)) if positions else ()

    def summed(numbers: Tensor) -> Tensor:
        numbers = numbers.double().sum(-1, keepdim=True)
        return numbers.mean(where, keepdim=True) if where else numbers

    mu = (summed(x) + removed * removed_mean) / total
    var = (summed((x - mu) ** 2) + removed_m2 + removed * (removed_mean - mu) ** 2) / total
    y = ((x - mu) / (var + eps).sqrt()).to(x.dtype)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).movedim(-1, channel_dim)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    channel_dim: int,
    eps: float | None,
    weight_offset: float,
    removed: float,
    removed_squares: float,
) -> Tensor:
    x = x.movedim(channel_dim, -1)
    mean = (x.double().square().sum(-1, keepdim=True) + removed_squares) / (x.size(-1) + removed)
    y = (x / (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).sqrt()).to(x.dtype)
    return (y if weight is None else y * (weight + weight_offset)).movedim(-1, channel_dim)


def _std_norm(
    x: Tensor,
    weight: Tensor | None,
    channel_dim: int,
    eps: float,
    removed: float,
    removed_mean: float,
    removed_m2: float,
) -> Tensor:
    x = x.movedim(channel_dim, -1)
    total = x.size(-1) + removed
    mu = (x.double().sum(-1, keepdim=True) + removed * removed_mean) / total
    squares = ((x - mu) ** 2).sum(-1, keepdim=True) + removed_m2 + removed * (removed_mean - mu) ** 2
    y = (x / (squares / (total - 1) + eps).sqrt()).to(x.dtype)
    return (y if weight is None else y * weight).movedim(-1, channel_dim)


for _name, _formula in (("layer_norm", _layer_norm), ("rms_norm", _rms_norm), ("std_norm", _std_norm)):
    _library.impl(_name, _fake_norm, "Meta")
    _library.impl(_name, _formula, "CPU")
    _library.impl(_name, _formula, "CUDA")


@dataclass(frozen=True)
class Norm:
    """What a module computes, if it is a norm over one dimension."""

    kind: str  # "layer", "rms", or "std": divided by the standard deviation and not centred
    channel_dim: int = -1  # -1, or 1 for channels first
    eps: float | None = None  # None: that of the input's dtype
    weight_offset: float = 0.0  # 1 where the weight is stored as its difference from 1
    positions: bool = False  # the statistics are those of all positions together: group norm with one group


@contextmanager
def as_one_op(module: nn.Module) -> Iterator[None]:
    """Let a norm show up as one `squeeze_release::layer_norm`, `rms_norm` or `std_norm` node while the block lasts."""
    norm = recognise(module)
    if norm is None:
        yield
        return

    removed = module.statistics.tolist() if isinstance(module, CompensatedNorm) else []

    def forward(x: Tensor) -> Tensor:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        result: Tensor
        if norm.kind == "layer":
            assert norm.eps is not None
            result = torch.ops.squeeze_release.layer_norm(
                x, weight, bias, norm.channel_dim, norm.eps, *(removed or (0.0, 0.0, 0.0)), norm.positions
            )
        elif norm.kind == "std":
            result = torch.ops.squeeze_release.std_norm(
                x, weight, norm.channel_dim, norm.eps, *(removed or (0.0, 0.0, 0.0))
            )
        else:
            result = torch.ops.squeeze_release.rms_norm(
                x, weight, norm.channel_dim, norm.eps, norm.weight_offset, *(removed or (0.0, 0.0))
            )
        return behind(module, result)

    module.forward = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def recognise(module: nn.Module) -> Norm | None:
    """The norm that a module computes, or None if it is not one."""
    if isinstance(module, CompensatedGroupNorm):
        return Norm("layer", 1, module.eps, positions=True)
    if isinstance(module, CompensatedStdNorm):
        return Norm("std", module.channel_dim, module.eps)
    if isinstance(module, CompensatedLayerNorm):
        return Norm("layer", module.channel_dim, module.eps)
    if isinstance(module, CompensatedRMSNorm):
        return Norm("rms", module.channel_dim, module.eps, module.weight_offset)
    if type(module) is nn.LayerNorm:
        return Norm("layer", eps=module.eps) if len(module.normalized_shape) == 1 else None
    if type(module) is nn.RMSNorm:
        return Norm("rms", eps=module.eps) if len(module.normalized_shape) == 1 else None
    if _width(module) is None or next(module.buffers(), None) is not None:
        return None
    if "forward" in module.__dict__ or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return None
    if isinstance(module, nn.GroupNorm) and module.num_groups != 1:
        return None
    candidates = [norm for eps in _small_floats(module) for norm in _norms(eps)]
    return next((norm for norm in candidates if _behaves(module, norm)), None)


def _width(module: nn.Module) -> int | None:
    """Over how many channels a module would be a norm: the length of its weight, or what its shape says."""
    weight: object = getattr(module, "weight", None)
    shape: object = getattr(module, "normalized_shape", None)
    if isinstance(weight, nn.Parameter):
        return len(weight) if weight.dim() == 1 else None
    if weight is not None or not isinstance(shape, (tuple, list)) or len(shape) != 1:
        return None
    return shape[0] if type(shape[0]) is int else None


def _small_floats(module: nn.Module) -> list[float]:
    """Attributes that may be its eps."""
    own = [value for name, value in vars(module).items() if isinstance(value, float) and "eps" in name]
    return list(dict.fromkeys(own))


def _norms(eps: float) -> Iterator[Norm]:
    for dim in (-1, 1):
        yield Norm("layer", dim, eps)
        yield Norm("rms", dim, eps)
        yield Norm("rms", dim, eps, weight_offset=1.0)
        yield Norm("std", dim, eps)
    yield Norm("layer", 1, eps, positions=True)


def _behaves(module: nn.Module, norm: Norm) -> bool:
    """Compare with the norm on random numbers, small ones too so that eps counts."""
    twin, width = copy.deepcopy(module).double().cpu().eval(), _width(module)
    weight, bias = getattr(twin, "weight", None), getattr(twin, "bias", None)
    if (norm.kind != "layer" and bias is not None) or (weight is None and norm.weight_offset):
        return False
    assert width is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_(generator=generator)
        for scale in (1.0, 1e-3):
            x = scale * torch.randn((2, 3, 5, width), generator=generator, dtype=torch.float64)
            want = _normed(x, norm, weight, bias)
            try:
                want = behind(twin, want.movedim(-1, norm.channel_dim)).movedim(norm.channel_dim, -1)
                got = twin(x.movedim(-1, norm.channel_dim)).movedim(norm.channel_dim, -1)
            except Exception:
                return False
            # Some norms compute in float32 inside; verification, which lifts such casts, is the judge in the end.
            if got.shape != want.shape or not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5):
                return False
    return True


def _normed(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of the last dimension, by torch's own functions."""
    assert norm.eps is not None
    if norm.positions:
        return F.group_norm(x.movedim(-1, 1), 1, weight, bias, norm.eps).movedim(1, -1)
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    if norm.kind == "std":
        y = x / (x.var(-1, keepdim=True) + norm.eps).sqrt()
        return y if weight is None else y * weight
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight + norm.weight_offset, norm.eps)
