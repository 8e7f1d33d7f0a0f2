"""How much every weight matters: functions of a model that return one number a weight, by parameter name.

All but `magnitude` and `random` are |gradient * weight| for one loss or another: what the loss would change by, to
first order, if the weight were 0. They differ in the loss and in how much data they see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError

Scores = dict[str, Tensor]


@torch.no_grad()
def gradient_times_weight(model: nn.Module) -> Scores:
    """|grad * weight| with the gradients that the last batch left behind: the paper's score."""
    named = dict(model.named_parameters())
    if all(p.grad is None for p in named.values()):
        raise InputError(
            "no parameter has a gradient",
            where=f"gradient_times_weight({type(model).__name__})",
            consequence="there is nothing to score the weights by",
            remedy="call zero_grad before the backward pass, not after the step; or use AveragedScores or magnitude",
        )
    return {n: torch.zeros_like(p) if p.grad is None else (p.grad * p).abs() for n, p in named.items()}


@torch.no_grad()
def magnitude(model: nn.Module) -> Scores:
    """|weight|."""
    return {name: parameter.abs() for name, parameter in model.named_parameters()}


@torch.no_grad()
def random(model: nn.Module, generator: torch.Generator | None = None) -> Scores:
    """A control: any weight is as good as another."""
    return {
        n: torch.rand(p.shape, generator=generator, dtype=torch.float32).to(p.device)
        for n, p in model.named_parameters()
    }


def snip(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Scores:
    """|grad * weight| of `loss(model)`, on a batch of the caller's choice, without touching the model's gradients."""
    named = dict(model.named_parameters())
    asked = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss(model), list(asked.values()), allow_unused=True)
    scores = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for (name, parameter), gradient in zip(asked.items(), gradients, strict=True):
        if gradient is not None:
            scores[name] = (gradient * parameter).abs().detach()
    return scores


def synflow(model: nn.Module, example_inputs: Any) -> Scores:
    """|grad * weight| of the sum of outputs, all weights made positive and all inputs 1: needs no data (Tanaka et al.).

    In float64 and eval mode: the product over many layers overflows float32.
    """
    twin = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.abs_()
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    ones = [torch.ones_like(x[:1], dtype=torch.float64) if x.is_floating_point() else x[:1] for x in inputs]

    def flow(net: nn.Module) -> Tensor:
        out: Tensor = net(*ones)
        return out.sum()

    return snip(twin, flow)


class AveragedScores:
    """|grad * weight| summed over the steps of an optimizer, by a hook on it.

    scores = AveragedScores(model, names)
    handle = optimizer.register_step_pre_hook(scores.see)
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._parameters = {name: model.get_parameter(name) for name in names}
        self.sums: Scores = {name: torch.zeros_like(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def see(self, *_: Any) -> None:
        there = [n for n, p in self._parameters.items() if p.grad is not None]
        gradients = [self._parameters[n].grad for n in there]
        products = torch._foreach_mul([self._parameters[n] for n in there], gradients)  # type: ignore[arg-type]
        torch._foreach_abs_(products)
        torch._foreach_add_([self.sums[n] for n in there], products)

    def __call__(self, model: nn.Module) -> Scores:
        """What was seen since the last call."""
        seen = {name: total.clone() for name, total in self.sums.items()}
        self.forget()
        return seen

    def forget(self) -> None:
        if self.sums:
            torch._foreach_zero_(list(self.sums.values()))


@torch.no_grad()
def toward_dead_units(scores: Mapping[str, Tensor], names: Iterable[str], power: float = 1.0) -> Scores:
    """Each score times that of its row and of its column, relative to the layer's mean, to some power.

    Only whole rows and columns make a network smaller, so a weight that is the last of a dying unit goes before one
    that is as small but has company.
    """
    changed = dict(scores)
    for name in names:
        score = scores[name]
        if score.dim() == 2:
            mean = score.mean().clamp_min(torch.finfo(score.dtype).tiny)
            rows, columns = score.mean(1, keepdim=True) / mean, score.mean(0, keepdim=True) / mean
            changed[name] = score * (rows * columns) ** power
    return changed
