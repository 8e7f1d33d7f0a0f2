"""Which entries of which parameters are dead, found by running the model; nothing here knows the analysis under test.

A *leaf* is a module that mixes or normalises channels: Linear, convolution, norm, embedding. All code between leaves is
glue. Three runs in float64, with saturating activations replaced by asinh (a ReLU that happens to be off is not dead):

    as it is    which channels are one number at every sample and position, at the input and output of each leaf
    cut         every leaf returns noise, so that gradients show what each leaf's output *directly* feeds. A channel is
                live if it feeds a channel that some leaf reads and that is not constant, or an output of the model
    cut again   with other noise in live channels: an input channel that stays as it was is fed by dead channels only

A layer norm may lose a constant input although its output then varies: two carriers speak for all constants. In the
first run its output is therefore 0 there. That is right only if none but a Linear or convolution reads it, which
`writer_norms` are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from leaves import Leaf, leaves
from precision import Float64
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from watch import Watch

Call = tuple[tuple[Any, ...], dict[str, Any]]

_SAME, _ZERO = 1e-9, 1e-12


_SATURATING = {
    *(F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardtanh, F.hardtanh_),
    *(F.hardswish, F.hardsigmoid, F.threshold),
}


class _Smooth(Float64):
    """No activation saturates; and layers that only lend their weight to F.linear are called like all others."""

    def __init__(self, lent: dict[int, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.lent = lent or {}
        self.used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SATURATING:
            return torch.asinh(args[0] if args else (kwargs or {})["input"])
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            self.used.add(id(given["weight"]))
            if id(given["weight"]) in self.lent:
                return self.lent[id(given["weight"])](given["input"], given["weight"], given.get("bias"))
        return super().__torch_function__(func, types, args, kwargs)


@dataclass
class Observation:
    """What the three runs showed, by leaf (vectors over its channels) or by parameter (tensors of its shape)."""

    leaves: dict[str, Leaf]
    constant_in: dict[str, Tensor] = field(default_factory=dict)
    live_out: dict[str, Tensor] = field(default_factory=dict)
    dead_in: dict[str, Tensor] = field(default_factory=dict)
    free_live: dict[str, Tensor] = field(default_factory=dict)
    writer_norms: set[str] = field(default_factory=set)
    lent: set[str] = field(default_factory=set)  # layers that are not called: someone else hands on their weight

    def masks(self) -> dict[str, Tensor]:
        """Parameter -> its entries that belong to dead channels."""
        masks = {name: ~live for name, live in self.free_live.items()}
        for name, live in self.live_out.items():
            masks |= {f"{name}.{own}": mask for own, mask in self._of_leaf(self.leaves[name], ~live).items()}
        return masks

    def lives(self, leaf: str) -> bool:
        """Whether someone reads it, and it reads something that varies."""
        constant = self.constant_in[leaf]
        return bool(self.live_out[leaf].any()) and not (len(constant) and bool(constant.all()))

    def _of_leaf(self, leaf: Leaf, dead: Tensor) -> dict[str, Tensor]:
        inputs, module = self.dead_in.get(leaf.name), leaf.module
        if leaf.kind == "recurrent":
            names = [name for name, _ in module.named_parameters() if name.startswith("weight_ih_l0")]
            return {name: inputs[None].expand(getattr(module, name).shape) for name in names}
        if leaf.kind == "attention":
            masks = {"out_proj.weight": dead[:, None].expand(module.out_proj.weight.shape), "out_proj.bias": dead}
            if module.in_proj_weight is not None:
                masks["in_proj_weight"] = inputs[None].expand(module.in_proj_weight.shape)
            return masks
        if leaf.is_norm and not bool(dead.all()):
            dead = dead & inputs  # as wide as what it reads
        shape = [1] * leaf.weight.dim()
        shape[leaf.rows] = -1
        weight = dead.view(shape).expand(leaf.weight.shape).clone()
        if leaf.kind == "affine":
            weight |= leaf.columns(inputs)
        bias = getattr(module, "bias", None)
        return {"weight": weight, **({"bias": dead} if isinstance(bias, Tensor) else {})}


@dataclass
class _Calls:
    """One list entry a call."""

    constant_in: list[Tensor] = field(default_factory=list)
    constant_out: list[Tensor] = field(default_factory=list)
    value_out: list[Tensor] = field(default_factory=list)
    shape_out: list[torch.Size] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    read_again: list[Tensor] = field(default_factory=list)


def observe(model: nn.Module, call: Call, writer_norms: set[str] | None = None) -> Observation:
    """Three runs. Without `writer_norms` they are found on the way."""
    with torch.enable_grad():
        return _observe(model.eval(), call, writer_norms)


def _observe(model: nn.Module, call: Call, writer_norms: set[str] | None) -> Observation:
    seen = Observation(leaves(model), writer_norms=writer_norms or set())
    calls = {name: _Calls() for name in seen.leaves}
    used = _run_as_it_is(model, call, seen, calls)
    silent = [leaf for name, leaf in seen.leaves.items() if leaf.kind == "affine" and not calls[name].constant_in]
    seen.lent = {leaf.name for leaf in silent if id(leaf.weight) in used}
    if seen.lent:
        calls = {name: _Calls() for name in seen.leaves}
        _run_as_it_is(model, call, seen, calls)
    calls = {name: c for name, c in calls.items() if c.constant_in}
    for name, c in calls.items():
        seen.constant_in[name] = torch.stack(c.constant_in).all(0)
    outputs, free = _run_cut(model, call, seen, calls)
    if writer_norms is None:
        seen.writer_norms = _writer_norms(seen, calls, outputs) | _nonlinear_norms(model, call, seen, calls)
    _settle(seen, calls, outputs, free)
    stuck = True
    while stuck:
        for c in calls.values():
            c.read_again.clear()
        _run_cut(model, call, seen, calls, again=True)
        for name, c in calls.items():
            if c.read:
                same = torch.stack([_unchanged(a, b) for a, b in zip(c.read, c.read_again, strict=True)]).all(0)
                seen.dead_in[name] = same & (seen.constant_in[name] | seen.leaves[name].unread())
        stuck = _norms_hold_on(seen)
    return seen


def _norms_hold_on(seen: Observation) -> bool:
    """A norm is as wide as what it reads: an output that nobody reads stays with a live input. Whether this is news."""
    news = False
    for name, live in seen.live_out.items():
        if seen.leaves[name].is_norm and bool(live.any()) and not bool((live | seen.dead_in[name]).all()):
            seen.live_out[name] = live | ~seen.dead_in[name]
            news = True
    return news


def _unchanged(a: Tensor, b: Tensor) -> Tensor:
    return (a.detach() - b.detach()).abs() <= _ZERO * a.detach().abs().max()


# ------------------------------------------------------------------------------------------------------------ the runs


@torch.no_grad()
def _run_as_it_is(model: nn.Module, call: Call, seen: Observation, calls: dict[str, _Calls]) -> set[int]:
    def hook(leaf: Leaf) -> Callable[..., Any]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            mine = calls[leaf.name]
            x = _first(args, kwargs)
            out = output[0] if isinstance(output, tuple) else output
            constant = torch.zeros(0, dtype=torch.bool) if leaf.kind == "table" else _constant(x, leaf.axis(x))
            if leaf.kind == "norm" and leaf.name not in seen.writer_norms and _one_group(module):
                at = [1] * out.dim()
                at[leaf.axis(out)] = -1
                out = output = out.masked_fill(constant.view(at), 0.0)
            axis = leaf.axis(out)
            mine.constant_in.append(constant)
            mine.constant_out.append(_constant(out, axis))
            mine.shape_out.append(out.shape)
            mine.value_out.append(out.movedim(axis, 0).flatten(1)[:, 0].clone())
            return output

        return look

    def lend(leaf: Leaf) -> Callable[..., Any]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return hook(leaf)(leaf.module, (x,), {}, F.linear(x, weight, bias))

        return linear

    with ExitStack() as stack:
        for leaf in seen.leaves.values():
            stack.callback(leaf.module.register_forward_hook(hook(leaf), with_kwargs=True).remove)
        lent = [seen.leaves[name] for name in seen.lent]
        mode = stack.enter_context(_Smooth({id(leaf.weight): lend(leaf) for leaf in lent}))
        for tensor in tensors(model(*call[0], **call[1])):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise FloatingPointError("the model computes NaN or infinity")
    return mode.used


def _one_group(module: nn.Module) -> bool:
    return getattr(module, "num_groups", 1) == 1


def _run_cut(
    model: nn.Module, call: Call, seen: Observation, calls: dict[str, _Calls], again: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every leaf returns noise, or its constants. Returns a sum of the outputs, and the parameters of the glue."""
    count = dict.fromkeys(calls, 0)

    def cut(leaf: Leaf, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            mine, number = calls[leaf.name], count[leaf.name]
            count[leaf.name] += 1
            x = _first(args, kwargs)
            if leaf.kind != "table":
                (mine.read_again if again else mine.read).append(_summed(x, leaf.axis(x), f"{leaf.name} {number}"))
            with torch.no_grad():
                made = _noise(mine.shape_out[number], f"{leaf.name} {number} out")
                at = [1] * made.dim()
                at[leaf.axis(made)] = -1
                if again:
                    live = seen.live_out[leaf.name].view(at)
                    made = torch.where(live, _noise(made.shape, f"{leaf.name} {number} other"), made)
                constant = mine.constant_out[number] & ~seen.live_out[leaf.name] if again else mine.constant_out[number]
                made = torch.where(constant.view(at), mine.value_out[number].view(at), made)
            mine.made += [] if again else [made.requires_grad_()]
            made = made * 1.0  # the caller may write into it
            return (made, *original(*args, **kwargs)[1:]) if leaf.kind in ("attention", "recurrent") else made

        return forward

    owned = {f"{name}.{own}" for name in calls for own, _ in seen.leaves[name].module.named_parameters()}
    free = {name: p for name, p in model.named_parameters() if name not in owned and p.is_floating_point()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in free)
    forwards = {leaf.module: cut(leaf, leaf.module.forward) for name, leaf in seen.leaves.items() if name in calls}
    lent = {id(leaf.weight): forwards[leaf.module] for name, leaf in seen.leaves.items() if name in seen.lent}
    with _patched(forwards), _Smooth(lent), torch.enable_grad():
        outputs = [t for t in tensors(model(*call[0], **call[1])) if t.requires_grad]
    return sum((_summed(t, 0, f"output {i}").sum() for i, t in enumerate(outputs)), torch.zeros(())), free


@contextmanager
def _patched(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            del module.forward


def _writer_norms(seen: Observation, calls: dict[str, _Calls], outputs: Tensor) -> set[str]:
    """Norms whose output reaches a norm, a depthwise convolution or an output of the model with no layer between."""
    kinds = ("norm", "channelwise")
    loss = outputs + sum(y.sum() for name, c in calls.items() if seen.leaves[name].kind in kinds for y in c.read)
    norms = [(name, made) for name, c in calls.items() if seen.leaves[name].kind == "norm" for made in c.made]
    if not norms or not loss.requires_grad:
        return set()
    grads = torch.autograd.grad(loss, [made for _, made in norms], retain_graph=True, allow_unused=True)
    return {name for (name, _), grad in zip(norms, grads, strict=True) if grad is not None and bool(grad.any())}


@torch.no_grad()
def _nonlinear_norms(model: nn.Module, call: Call, seen: Observation, calls: dict[str, _Calls]) -> set[str]:
    """Norms that are read through an activation, a product or another function that is not linear."""
    watch = Watch({id(seen.leaves[name].weight) for name in seen.lent})
    count = dict.fromkeys(calls, 0)

    def cut(leaf: Leaf, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = count[leaf.name]
            count[leaf.name] += 1
            if leaf.kind in ("attention", "recurrent"):
                with torch._C.DisableTorchFunction():
                    return original(*args, **kwargs)
            made = _noise(calls[leaf.name].shape_out[number], f"{leaf.name} {number}")
            if leaf.kind == "norm":
                watch.follow(made, frozenset({leaf.name}))
            return made

        return forward

    forwards = {leaf.module: cut(leaf, leaf.module.forward) for n, leaf in seen.leaves.items() if n in calls}
    with _patched(forwards), watch:
        model(*call[0], **call[1])
    return watch.found


def _settle(seen: Observation, calls: dict[str, _Calls], outputs: Tensor, free: dict[str, Tensor]) -> None:
    """What is live, to the fixed point: a norm or depthwise channel is read if its own output is."""
    made = [(name, tensor) for name, c in calls.items() for tensor in c.made]
    for name, c in calls.items():
        seen.live_out[name] = torch.zeros(len(c.constant_out[0]), dtype=torch.bool)
    while True:
        loss = outputs
        for name, c in calls.items():
            if any(y.requires_grad for y in c.read):
                live = _reads(seen, seen.leaves[name]).double()
                loss = loss + sum((y * live).sum() for y in c.read)
        wanted = [tensor for _, tensor in made] + list(free.values())
        grads = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        before = {name: live.clone() for name, live in seen.live_out.items()}
        for (name, tensor), grad in zip(made, grads, strict=False):
            if grad is not None:
                size = grad.abs().movedim(seen.leaves[name].axis(tensor), 0).flatten(1).amax(1)
                seen.live_out[name] |= size > _ZERO * size.max()
        if all(torch.equal(before[name], live) for name, live in seen.live_out.items()):
            break
    for (name, parameter), grad in zip(free.items(), grads[len(made) :], strict=True):
        if grad is not None and parameter.dim() > 0:
            seen.free_live[name] = grad.abs() > _ZERO * grad.abs().max()


def _reads(seen: Observation, leaf: Leaf) -> Tensor:
    varies, live = ~seen.constant_in[leaf.name], seen.live_out[leaf.name]
    if leaf.kind == "affine":
        return varies & ~leaf.unread()
    if leaf.kind == "channelwise":
        return live.view(len(varies), -1).any(1)
    if leaf.kind == "norm":
        return varies | live if bool(live.any()) else live
    return varies


# ------------------------------------------------------------------------------------------------------------- helpers


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _first(args: Any, kwargs: Any) -> Tensor:
    first: Tensor = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    return first


def _constant(x: Tensor, axis: int) -> Tensor:
    """Channels that are one number everywhere."""
    rows = x.movedim(axis, 0).flatten(1)
    return rows.amax(1) - rows.amin(1) <= _SAME * max(float(x.abs().max()), 1e-30)


def _noise(shape: torch.Size, key: str) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(key))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def hash_of(key: str) -> int:
    """The same in every process, which `hash` of a string is not."""
    value = 0
    for letter in key.encode():
        value = (value * 1000003 + letter) % (2**61 - 1)
    return value


def _summed(x: Tensor, axis: int, key: str) -> Tensor:
    """One number a channel, in which every element counts."""
    return (x * _noise(x.shape, key)).movedim(axis, 0).flatten(1).sum(1)
