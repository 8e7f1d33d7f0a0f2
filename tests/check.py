"""One helper that asks everything of a squeeze: golden widths, outputs, gradients, idempotence, an untouched model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import squeeze_release as sr

TOLERANCE = 1e-10


def check(
    model: nn.Module,
    inputs: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    golden: dict[str, object] | None = None,
    again: bool = True,
    gradients: bool = True,
    **options: Any,
) -> sr.Squeezed:
    """Squeeze a float64 model and check it. `golden` maps "path.attribute" to the value it must have afterwards.

    A golden value may be a shape (tuple) for a tensor, a number, or a class for a module. Gradients are left out where
    a carrier stays: it acts for others too, so what it does to the output is more than it was.
    """
    model = model.double()
    before = copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    squeezed = sr.squeeze(model, inputs, kwargs, **options)
    assert_untouched(model, before, modes)
    assert squeezed.report.max_error is not None and squeezed.report.max_error <= TOLERANCE
    for path, want in (golden or {}).items():
        have = look_up(squeezed.model, path)
        assert have == want, f"{path} is {have}, not {want}\n{squeezed.report}"
    calls = inputs if isinstance(inputs, list) else [inputs]
    for call in calls:
        call = call if isinstance(call, tuple) else (call,)
        assert_same(model, squeezed.model, call, kwargs or {})
        if gradients and not squeezed.report.carriers:
            assert_same_gradients(model, squeezed, call, kwargs or {})
    if again:
        second = sr.squeeze(squeezed.model, inputs, kwargs, **options)
        assert second.report.params_after == squeezed.report.params_after, f"not a fixed point\n{second.report}"
    return squeezed


def look_up(model: nn.Module, path: str) -> object:
    value: Any = model
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() and not hasattr(value, part) else getattr(value, part)
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return type(value) if isinstance(value, nn.Module) else value


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def error(old: Tensor, new: Tensor) -> float:
    assert old.shape == new.shape and old.dtype == new.dtype
    old, new = old.detach(), new.detach()
    return float((new - old).abs().max() / old.abs().max().clamp(min=1e-6))


def close(got: Tensor, want: Tensor, tol: float = 1e-12) -> None:
    """One tensor against another, at rounding error."""
    assert got.shape == want.shape and got.dtype == want.dtype and torch.isfinite(want).all()
    assert error(want, got) <= tol, f"relative error {error(want, got):.1e}"


@torch.no_grad()
def assert_same(
    old: nn.Module, new: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float = TOLERANCE
) -> None:
    """Both in eval mode, on the example and on fresh random numbers."""
    old, new = copy.deepcopy(old).eval(), copy.deepcopy(new).eval()
    fresh = pytree.tree_map(
        lambda t: torch.randn_like(t) if isinstance(t, Tensor) and t.is_floating_point() else t, args
    )
    for call in (args, fresh):
        for a, b in zip(tensors(old(*call, **kwargs)), tensors(new(*call, **kwargs)), strict=True):
            assert error(a, b) <= tolerance


def assert_same_gradients(old: nn.Module, squeezed: sr.Squeezed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Parameters that were merely sliced have the gradients of the original, sliced alike."""
    grads_old, grads_new = gradients_of(old, args, kwargs), gradients_of(squeezed.model, args, kwargs)
    was = dict(old.named_parameters())
    compared = 0
    for name, parameter in squeezed.model.named_parameters():
        if name not in was or name not in grads_old or name not in grads_new:
            continue
        value, gradient = was[name].detach(), grads_old[name]
        for dim, index in squeezed.report.slices.get(name, {}).items():
            value, gradient = value.index_select(dim, index), gradient.index_select(dim, index)
        if value.shape == parameter.shape and torch.equal(value, parameter.detach()):
            scale = max(float(g.abs().max()) for g in grads_old.values())
            assert float((grads_new[name] - gradient).abs().max()) <= 1e-10 * max(scale, 1e-6), f"gradient of {name}"
            compared += 1
    assert compared or not list(squeezed.model.parameters())


def gradients_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    model = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(7)
    outputs = [t for t in tensors(model(*args, **kwargs)) if t.requires_grad]
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in outputs)
    if not isinstance(loss, Tensor):
        return {}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, grads, strict=True) if g is not None}


def assert_untouched(model: nn.Module, before: dict[str, Tensor], modes: dict[str, bool]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any("forward" in vars(module) for module in model.modules())


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)


def noisy(model: nn.Module) -> nn.Module:
    """Random numbers in every 1-d parameter and running statistic, so that no constant is 0 or 1 by accident."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.5)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
    return model
