"""Pruning masks become exact zeros; models in float64, checks and counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import copy_model
from .errors import MaskError, ModelError, WeightError
from .modules import NarrowMultiheadAttention
from .pieces import spans

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_RUNNING_STATISTICS = ("running_mean", "running_var")


# --- float64 ---------------------------------------------------------------------------------------------------------


def to_float64(model: nn.Module) -> None:
    """In place: parameters, buffers and tensors in plain attributes become float64, and all parameters trainable.

    For comparisons: frozen weights would hide the path that a model takes with gradients.
    """
    if any(parameter.is_mps for parameter in model.parameters()):
        model.cpu()  # MPS has no float64
    model.double()
    internals = vars(nn.Module()).keys()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else widen(buffer)  # double() leaves complex buffers
        for name, value in vars(module).items():
            if name not in internals and any(
                isinstance(x, Tensor) and x.dtype in WIDER for x in pytree.tree_leaves(value)
            ):
                vars(module)[name] = pytree.tree_map_only(Tensor, widen, value)  # tables that nobody registered
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


class InFloat64(TorchDispatchMode):
    """Casts to lower precision become casts to float64: transformers' RMSNorm computes in float32 on purpose.

    `ops` lists the operators that ran; with `lift=False` they are only listed.
    """

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self, lift: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lift, self.ops = lift, list[Any]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(func)
        if not self.lift or func is torch.ops.aten.view.dtype:  # which reads the same bits as another type
            return func(*args, **(kwargs or {}))
        args = tuple(_wider_dtype(value) for value in args)
        kwargs = {name: _wider_dtype(value) for name, value in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        return widen(result) if _creates_tensor(func) and isinstance(result, Tensor) else result


def _wider_dtype(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@cache
def _creates_tensor(func: Any) -> bool:
    # zeros(n) without a dtype would take float32 and round what is written into it; lift_fresh is torch.tensor(0.5).
    if not isinstance(func, torch._ops.OpOverload):
        return False
    takes_tensor = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return not takes_tensor or func is torch.ops.aten.lift_fresh.default


def widen(tensor: Tensor) -> Tensor:
    """In float64 or complex128, if it is a float or complex at all."""
    return (tensor.cpu() if tensor.is_mps else tensor).to(WIDER.get(tensor.dtype, tensor.dtype))


# --- masks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Masked:
    """A masked tensor: `original` is what trains, `value` is what the layer computes with."""

    module: nn.Module
    name: str
    original: Tensor
    value: Tensor


def bake_masks(model: nn.Module) -> None:
    """In place: masks of torch.nn.utils.prune and torch.nn.utils.parametrize become plain parameters with exact zeros.

    A parametrization counts as a mask when its eval-mode output is, at every element, its original or zero. Raises
    MaskError for masks that are not 0/1 or do not fit, ModelError for other parametrizations; then no mask is baked.
    Tied weights stay tied where both ends compute with the same values.
    """
    found = [masked for path, module in model.named_modules() for masked in _find_masks(path, module)]
    _drop_masks({masked.module for masked in found})
    baked: dict[int, list[Tensor]] = {}
    for masked in found:
        _put_back(masked, _share(masked, baked.setdefault(id(masked.original), [masked.original])))


def _find_masks(path: str, module: nn.Module) -> Iterator[_Masked]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            yield _pruned(path, module, hook)
        elif type(hook).__name__ in ("WeightNorm", "SpectralNorm") and type(hook).__module__.startswith("torch.nn."):
            raise _not_a_mask(path, hook, "torch.nn.utils.remove_weight_norm or remove_spectral_norm")
    if parametrize.is_parametrized(module):
        for name, steps in getattr(module, "parametrizations").items():  # noqa: B009 - mypy sees Tensor | Module
            yield _parametrized(path, module, name, steps)


def _pruned(path: str, module: nn.Module, hook: Any) -> _Masked:
    name = hook._tensor_name
    original, mask = getattr(module, f"{name}_orig"), getattr(module, f"{name}_mask")
    where = _join(path, name)
    _check_mask(original, mask, where)
    with torch.no_grad():
        value = hook.apply_mask(module)
    if not _is_masked(original, value):
        raise _bad_mask(f"{type(hook).__name__}.apply_mask changes weights that it does not zero", where)
    return _Masked(module, name, original, _with_exact_zeros(original, value))


def apply_mask(original: Tensor, mask: Tensor, where: str) -> Tensor:
    """What torch.nn.utils.prune makes of a weight and its mask, with exact zeros. Raises MaskError as above."""
    _check_mask(original, mask, where)
    return _with_exact_zeros(original, original * mask.to(original.dtype))


def _check_mask(original: Tensor, mask: Tensor, where: str) -> None:
    if not _broadcasts(mask.shape, original.shape):
        raise _bad_mask(f"mask of shape {tuple(mask.shape)} on a weight of shape {tuple(original.shape)}", where)
    if not ((mask == 0) | (mask == 1)).all():
        raise _bad_mask("mask with values other than 0 and 1", where)


def _parametrized(path: str, module: nn.Module, name: str, steps: Any) -> _Masked:
    where = _join(path, name)
    steps.eval()  # spectral_norm updates its vectors in train mode, and the function to keep is that of eval mode
    has_mask = any(isinstance(getattr(step, "mask", None), Tensor) for step in steps)
    try:
        with torch.no_grad():
            # Not module.<name>: that reads parametrize's cache, whose key is the module that this one was copied from.
            value = steps()
    except Exception as error:
        if not has_mask:
            raise
        raise _bad_mask(f"the mask cannot be applied: {error}", where) from error
    if steps.is_tensor and value.shape == steps.original.shape and _is_masked(steps.original, value):
        return _Masked(module, name, steps.original, _with_exact_zeros(steps.original, value))
    if has_mask:
        raise _bad_mask("mask with values other than 0 and 1", where)
    raise _not_a_mask(where, steps[0], "torch.nn.utils.parametrize.remove_parametrizations")


def _broadcasts(mask: torch.Size, weight: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(mask, weight) == weight)
    except RuntimeError:
        return False


def _is_masked(original: Tensor, value: Tensor) -> bool:
    # A NaN that comes from a NaN or infinite weight is the weight's fault, and check_finite names it.
    return bool(((value == original) | (value == 0) | (value.isnan() & ~original.isfinite())).all())


def _with_exact_zeros(original: Tensor, value: Tensor) -> Tensor:
    zeroed = torch.empty_like(original, requires_grad=False).copy_(value)
    return zeroed.masked_fill_(zeroed == 0, 0.0)  # 0 * -1.5 is -0.0


def _drop_masks(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, BasePruningMethod):
                del module._forward_pre_hooks[key]
                for attribute in ("", "_orig", "_mask"):
                    delattr(module, hook._tensor_name + attribute)
        if parametrize.is_parametrized(module):
            # Not remove_parametrizations: it edits the generated class, which a deep copy shares with its original.
            plain_class = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            module.__class__ = plain_class


def _share(masked: _Masked, same_origin: list[Tensor]) -> Tensor:
    """One tensor for all modules that shared `original` and still compute with equal values."""
    for candidate in same_origin:
        if torch.equal(candidate, masked.value):
            return candidate
    value = masked.value
    if isinstance(masked.original, nn.Parameter):
        value = nn.Parameter(value, requires_grad=masked.original.requires_grad)
    same_origin.append(value)
    return value


def _put_back(masked: _Masked, value: Tensor) -> None:
    module, name = masked.module, masked.name
    if not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
        return
    setattr(module, name, value)  # not register_parameter: nn.LSTM keeps a second list of its weights up to date here
    # prune and parametrize move a tensor to the end; state_dict should list it where the unpruned model does.
    names = [other for other in module._parameters if other != name]
    twin = name.replace("weight", "bias")
    names.insert(names.index(twin) if twin in names else len(names), name)
    known: list[str] = getattr(module, "_flat_weights_names", names)
    for name in sorted(names, key=lambda n: known.index(n) if n in known else len(known)):
        module._parameters[name] = module._parameters.pop(name)


def _bad_mask(what: str, where: str) -> MaskError:
    return MaskError(
        what,
        where=where,
        consequence="it is not clear which weights are pruned; the model is left as it was",
        remedy="use a mask of zeros and ones that broadcasts to the weight",
    )


def _not_a_mask(where: str, step: object, remedy: str) -> ModelError:
    return ModelError(
        f"{type(step).__name__} computes a weight from other tensors and is not a mask",
        where=where,
        consequence="its channels cannot be cut out one by one; the model is left as it was",
        remedy=f"make the weight plain first: {remedy}",
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- checks and counts -----------------------------------------------------------------------------------------------


def check_finite(model: nn.Module) -> None:
    """Raises WeightError if a parameter or a running statistic is NaN or infinite.

    Other buffers are not checked: attention masks hold -inf on purpose.
    """
    statistics = ((n, b) for n, b in model.named_buffers() if n.rpartition(".")[2] in _RUNNING_STATISTICS)
    bad = {name: count for name, t in [*model.named_parameters(), *statistics] if (count := _not_finite(t))}
    if bad:
        shown = [f"{name} ({count} entries)" for name, count in list(bad.items())[:3]]
        more = [f"and {len(bad) - 3} more"] if len(bad) > 3 else []
        raise WeightError(
            f"{sum(bad.values())} entries are NaN or infinite",
            where=", ".join(shown + more),
            consequence="there is no function to preserve; the model is left as it was",
            remedy="go back to a checkpoint from before the training diverged",
        )


def _not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    tensor = tensor.detach() if tensor.dim() else tensor.detach()[None]
    pieces = (tensor[span] for span in spans(tensor))
    if tensor.itemsize == 1:
        pieces = (piece.float() for piece in pieces)  # isfinite has no float8 kernels
    return sum(piece.numel() - int(torch.isfinite(piece).sum()) for piece in pieces)


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that pruning is about, by name: Linear, convolutions, attention projections; tied ones once.

    Of a model without masks; see bake_masks.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name in _prunable_names(module):
            weight = module._parameters.get(name)
            if weight is not None:
                found.setdefault(id(weight), (_join(path, name), weight))
    return dict(found.values())


def _prunable_names(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, (nn.MultiheadAttention, NarrowMultiheadAttention)):
        return _ATTENTION_WEIGHTS
    return ("weight",) if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) else ()


@dataclass(frozen=True)
class Counts:
    """Sizes of a model; alive means not zero, and every tensor counts once."""

    params: int
    params_alive: int
    weights: int
    """Entries of the prunable weights: the size that papers on fully connected networks report."""
    weights_alive: int


def count(model: nn.Module) -> Counts:
    """Counts the entries of `model`, with its masks applied if it has any."""
    if any(_carries_mask(module) for module in model.modules()):
        model = copy_model(model)
        bake_masks(model)
    params, weights = list(model.parameters()), list(prunable(model).values())
    return Counts(_size(params), _alive(params), _size(weights), _alive(weights))


def _carries_mask(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return parametrize.is_parametrized(module) or any(isinstance(hook, BasePruningMethod) for hook in hooks)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _alive(tensors: Iterable[Tensor]) -> int:
    return sum(int(torch.count_nonzero(t.detach())) for t in tensors)
