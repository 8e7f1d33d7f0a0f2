"""Carry out a plan on the user's own modules: slice, fold, swap. Every fold is computed in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .analyse.blocks import Replacement
from .copies import drop_gradients
from .masks import bake_masks
from .modules import (
    CompensatedGroupNorm,
    CompensatedLayerNorm,
    CompensatedRMSNorm,
    CompensatedStdNorm,
    Constant,
    NarrowMultiheadAttention,
    Passthrough,
    Shift,
    narrow_attention,
    with_index,
    with_place,
)
from .modules.state import CompensatedNorm
from .plan import Carry, ConstantRows, Fold, Plain, Plan
from .trace.caches import let_go
from .trace.norms import Norm


class Tensors:
    """The parameters and buffers of a model by name. Setting one replaces it under every name it is tied to."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[str, list[str]] = {}
        ties: dict[int, list[str]] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            ties.setdefault(id(tensor), []).append(name)
            self.names[name] = ties[id(tensor)]

    def __getitem__(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        tensor = getattr(self.model.get_submodule(path), attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    def __setitem__(self, name: str, new: Tensor) -> None:
        old = self[name]
        new = new.to(old.device, old.dtype)
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.dim())
        if channels_last and not old.is_contiguous() and old.is_contiguous(memory_format=channels_last):
            new = new.contiguous(memory_format=channels_last)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for tied in self.names[name]:
            path, _, attribute = tied.rpartition(".")
            setattr(self.model.get_submodule(path), attribute, new)


@torch.no_grad()
def rewrite(model: nn.Module, plan: Plan) -> nn.Module:
    """Narrow a model in place; returns it (a model that is itself a single layer may be another object)."""
    tensors = Tensors(model)
    for rows in plan.constant.values():
        _make_constant(tensors, rows, plan)
    for fold in plan.folded.values():
        _add_to_bias(tensors, fold, plan)
    for name, factors in plan.scaled.items():
        old = tensors[name]
        tensors[name] = old.double() * factors.to(old.device).reshape(-1, *[1] * (old.dim() - 1))
    for name, carries in plan.carried.items():
        tensors[name] = functools.reduce(_carry, carries.values(), tensors[name])
    for name, values in plan.replaced_values.items():
        tensors[name] = values
    for name, columns in plan.group_columns.items():
        tensors[name] = _columns_of_groups(tensors[name], columns)
    for name, dims in plan.slices.items():
        new = tensors[name]
        for dim, index in dims.items():
            # Along a dimension that is expanded, as in a hollow copy, one entry is like the other.
            hollow = new.stride(dim) == 0
            new = new.narrow(dim, 0, len(index)) if hollow else new.index_select(dim, index.to(new.device))
        tensors[name] = new
    return _refit(model, plan)


def _columns_of_groups(weight: Tensor, columns: Tensor) -> Tensor:
    """The columns of a grouped weight that each of its groups keeps."""
    rows = weight.unflatten(0, (len(columns), -1)).unbind(0)
    return torch.cat([row.index_select(1, kept.to(weight.device)) for row, kept in zip(rows, columns, strict=True)])


def carry_out(plans: Sequence[Plan], source: nn.Module) -> nn.Module:
    """Narrow the user's own model, masks and all. Old tensors are freed one by one, so it takes next to no memory.

    Only for plans that were carried out on a copy before: there is no way back.
    """
    bake_masks(source)
    drop_gradients(source)
    small = functools.reduce(rewrite, plans, source)
    if small is not source:  # a model that is itself a single layer
        source.__class__, source.__dict__ = small.__class__, small.__dict__
    return source


def _make_constant(tensors: Tensors, rows: ConstantRows, plan: Plan) -> None:
    """Zero the rows of a weight and let its bias hold their value."""
    weight = rows.fold.weight
    old = tensors[weight]
    keep = (~rows.only).to(old.device, old.dtype)
    if rows.fold.rows == 0:
        tensors[weight] = old * keep.reshape(-1, *[1] * (old.dim() - 1))
    else:
        tensors[weight] = old * keep.reshape(1, -1, *[1] * (old.dim() - 2))
    bias = tensors[rows.fold.bias].double() if rows.fold.bias else torch.zeros_like(rows.fold.delta, device=old.device)
    delta = torch.where(rows.only.to(old.device), rows.fold.delta.to(old.device) - bias, 0.0)
    _add_to_bias(tensors, replace(rows.fold, delta=delta), plan)


def _add_to_bias(tensors: Tensors, fold: Fold, plan: Plan) -> None:
    if fold.bias is not None:
        old = tensors[fold.bias]
        tensors[fold.bias] = old.double() + fold.delta.to(old.device)
        return
    if not bool(fold.delta.any()):
        return
    like = tensors[fold.weight]
    index, factors = plan.slices.get(fold.weight, {}).get(fold.rows), plan.scaled.get(fold.weight)
    delta = fold.delta if factors is None else fold.delta * factors.to(fold.delta.device)  # a bias scales with its rows
    delta = delta if index is None else delta[index]
    new = nn.Parameter(delta.to(like.device, like.dtype), requires_grad=like.requires_grad)
    tensors.model.get_submodule(fold.module).bias = new


def _carry(weight: Tensor, carry: Carry) -> Tensor:
    """Add the columns that go to those of their carriers."""
    if not any(weight.stride()):  # a hollow copy
        return weight
    new = weight.clone()
    wide = new.movedim(carry.columns, 1)
    for rows, found in zip(wide.chunk(len(carry.groups)), carry.groups, strict=True):
        if found is not None:
            gone, carriers = found.gone.to(new.device), found.carriers.to(new.device)
            more = torch.tensordot(rows[:, gone].double(), found.factors.to(new.device), dims=([1], [0])).movedim(-1, 1)
            rows[:, carriers] = (rows[:, carriers].double() + more).to(new.dtype)
    return new


def _refit(model: nn.Module, plan: Plan) -> nn.Module:
    """Make the modules agree with their new parameters."""
    for path, groups in plan.groups.items():
        model.get_submodule(path).groups = groups  # type: ignore[assignment]
    for module in model.modules():
        refresh(module)
    for path, sizes in plan.sizes.items():
        for attribute, size in sizes.items():
            setattr(model.get_submodule(path), attribute, size)
    for path, (old, new) in plan.rescaled.items():
        _rescale(model.get_submodule(path), old, new)
    for path, attributes in plan.attributes.items():
        for attribute, value in attributes.items():
            setattr(model.get_submodule(path), attribute, value)
    for path, made in plan.plain.items():
        model = swap(model, path, _plain(model.get_submodule(path), made))
    for path, index in plan.indices.items():
        model = swap(model, path, with_index(model.get_submodule(path), index))
    for path, live in plan.placed.items():
        model = swap(model, path, with_place(model.get_submodule(path), live))
    for path, width in plan.unread_norms.items():
        if path not in plan.norms and hasattr(model.get_submodule(path), "normalized_shape"):
            model.get_submodule(path).normalized_shape = (width,)  # type: ignore[assignment]
    for path, (norm, constants) in plan.norms.items():
        model = swap(model, path, compensated(model.get_submodule(path), norm, constants))
    for path, heads in plan.heads.items():
        mha = model.get_submodule(path)
        assert isinstance(mha, (nn.MultiheadAttention, NarrowMultiheadAttention))
        model = swap(model, path, narrow_attention(mha, heads.count, heads.head_dim, heads.v_head_dim, heads.scale))
    for path, replacement in plan.dead.items():
        model = swap(model, path, _stand_in(model.get_submodule(path), replacement))
    for module in model.modules():
        _leave_fast_path(module)
    let_go(model)
    return model


def _leave_fast_path(module: nn.Module) -> None:
    """nn.TransformerEncoder's fast path reads the parameters of its layers without calling them."""
    if isinstance(module, nn.TransformerEncoderLayer):
        plain = all(type(norm) is nn.LayerNorm for norm in (module.norm1, module.norm2))
        if not plain or not all(type(linear) is nn.Linear for linear in (module.linear1, module.linear2)):
            module.activation_relu_or_gelu = 0
    elif isinstance(module, nn.TransformerEncoder):
        fast = [
            type(layer) is nn.TransformerEncoderLayer
            and type(layer.self_attn) is nn.MultiheadAttention
            and layer.activation_relu_or_gelu
            for layer in module.layers
        ]
        module.use_nested_tensor = module.use_nested_tensor and all(fast)


def refresh(module: nn.Module) -> None:
    """Let the attributes of torch's own layers say what their parameters are."""
    if isinstance(module, nn.modules.batchnorm._NormBase) and isinstance(module.running_mean, Tensor):
        module.num_features = len(module.running_mean)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd):
        one, other = weight.size(0), weight.size(1) * module.groups
        module.out_channels, module.in_channels = (other, one) if module.transposed else (one, other)
    elif isinstance(module, nn.LayerNorm) and weight.dim() == 1:
        module.normalized_shape = (len(weight),)
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(weight)


def compensated(old: nn.Module, norm: Norm, constants: Tensor) -> nn.Module:
    """The norm on fewer channels, with the statistics of the removed ones."""
    if isinstance(old, CompensatedNorm):
        old.normalized_shape = (old.normalized_shape[0] - len(constants),)
        old.merge(constants)
        return old
    weight, like = getattr(old, "weight", None), next(iter(old.parameters()), None)
    width = len(weight) if weight is not None else int(old.normalized_shape[0]) - len(constants)  # type: ignore[index]
    new: CompensatedLayerNorm | CompensatedRMSNorm
    if norm.kind == "rms":
        new = CompensatedRMSNorm(width, norm.eps, False, weight_offset=norm.weight_offset, channel_dim=norm.channel_dim)
    else:
        assert norm.eps is not None
        plain = CompensatedStdNorm if norm.kind == "std" else CompensatedLayerNorm
        kind = CompensatedGroupNorm if norm.positions else plain
        new = kind(width, norm.eps, False, channel_dim=norm.channel_dim)
        new.bias = getattr(old, "bias", None)
    new.weight = weight
    for name, child in old.named_children():  # an activation, say
        new.add_module(name, child)
    if like is not None:
        new.to(like.device)
    new.merge(constants)
    inherit(new, old)
    return new


def _plain(old: nn.Module, made: Plain) -> nn.Module:
    """A convolution with the weight that the old one computes."""
    assert isinstance(old, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    size: Any = old.kernel_size
    new = made.kind(old.in_channels, old.out_channels, size, bias=False, device="meta", **made.arguments)
    like = old.weight
    new.weight = nn.Parameter(made.weight.to(like.device, like.dtype), requires_grad=like.requires_grad)
    new.bias = old.bias
    inherit(new, old)
    return new


def _stand_in(module: nn.Module, replacement: Replacement) -> nn.Module:
    like = next(module.parameters())
    new: nn.Module
    if replacement.kind == "passthrough":
        new = Passthrough(outputs=replacement.outputs)
    else:
        assert replacement.value is not None
        numbers = replacement.value.to(like.device, like.dtype)
        new = (Shift if replacement.kind == "shift" else Constant)(
            numbers, channel_dim=replacement.channel_dim, outputs=replacement.outputs
        )
        for parameter in new.parameters():
            parameter.requires_grad_(any(p.requires_grad for p in module.parameters()))
    return inherit(new, module)


def inherit(new: nn.Module, old: nn.Module) -> nn.Module:
    """Hooks and mode of the module that is replaced."""
    new.training = old.training
    for hooks in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        setattr(new, hooks, getattr(old, hooks))
    if isinstance(new, Passthrough) and hasattr(old, "batch_first"):  # nn.TransformerEncoder asks its first attention
        new.batch_first = old.batch_first
    return new


def swap(model: nn.Module, path: str, new: nn.Module) -> nn.Module:
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:  # under every name it has
                parent._modules[name] = new
    return new if old is model else model


def _rescale(module: nn.Module, old: float, new: float) -> None:
    for name, value in vars(module).items():
        if isinstance(value, float) and abs(value - old) <= 1e-12 * abs(old):
            setattr(module, name, new)
