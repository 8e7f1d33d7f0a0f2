"""What may be pruned, and in which units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import check_choice
from ..modules import NarrowMultiheadAttention

CONVOLUTION_UNITS = ("filter", "element", "input")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ATTENTION = (nn.MultiheadAttention, NarrowMultiheadAttention)
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))


@dataclass(frozen=True)
class Target:
    """Weights of one layer, or of several that live and die together, and the unit in which they go.

    names: the parameters, all of one shape.
    unit: "element", "filter" (all that makes one output), "input" (all that reads one input).
    parts: how many parameters are stacked along the rows of each: 3 for a packed q, k, v.
    """

    names: tuple[str, ...]
    unit: str = "element"
    parts: int = 1

    def unit_scores(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The mean score of the weights of every unit, in a shape that broadcasts over a weight."""
        stacked = torch.stack([scores[name].unflatten(0, (self.parts, -1)) for name in self.names])
        return stacked.mean([0, 1, *(dim + 2 for dim in self._spans(stacked.dim() - 2))], keepdim=True)[0, 0]

    def expand(self, units: Tensor, like: Tensor) -> Tensor:
        """From one value a unit to one value a weight."""
        return units.repeat(self.parts, *[1] * (units.dim() - 1)).expand(like.shape)

    def slots(self, weight: Tensor) -> int:
        """How many weights one unit has."""
        shape = weight.unflatten(0, (self.parts, -1)).shape[1:]
        return self.parts * len(self.names) * int(torch.Size([shape[dim] for dim in self._spans(len(shape))]).numel())

    def _spans(self, dims: int) -> list[int]:
        """The dimensions of a weight that a unit covers as a whole."""
        own = {"element": range(dims), "filter": (0,), "input": (1,)}[self.unit]
        return [dim for dim in range(dims) if dim not in own]


def find_targets(
    model: nn.Module, *, conv: str = "filter", joint: bool = False, skip: Iterable[str] = ()
) -> list[Target]:
    """All weights of Linear, Conv and MultiheadAttention layers. Biases, norms and embeddings are never pruned.

    Args:
        conv: the unit of convolutions: "filter" (what squeezing can remove), "element" or "input".
        joint: rows of q, k and v at the same output position go together, as whole rows.
        skip: names of modules, with all that is inside, that are left alone.

    >>> [target.names for target in find_targets(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))]
    [('0.weight',), ('2.weight',)]
    """
    check_choice("conv", conv, CONVOLUTION_UNITS, of="find_targets", consequence="nothing was pruned")
    skip = set(skip)
    modules = {name: module for name, module in model.named_modules() if not _inside(name, skip)}
    attention = list(_attention(modules)) if joint else []
    taken = {name for target in attention for name in target.names}
    found, seen = attention, {id(model.get_parameter(name)) for name in taken}
    for name, module in modules.items():
        for target in _targets_of(name, module, conv):
            weight = model.get_parameter(target.names[0])
            if id(weight) not in seen:  # a weight that is tied to an embedding, or used twice, counts once
                seen.add(id(weight))
                found.append(target)
    return [target for target in found if not _embeds(target, modules, model)]


def _targets_of(name: str, module: nn.Module, conv: str) -> Iterator[Target]:
    if isinstance(module, nn.Linear):
        yield Target((_join(name, "weight"),))
    elif isinstance(module, _CONVOLUTIONS):
        yield Target((_join(name, "weight"),), conv)
    elif isinstance(module, _ATTENTION):
        for parameter in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(module, parameter, None) is not None:
                yield Target((_join(name, parameter),))


def _attention(modules: dict[str, nn.Module]) -> Iterator[Target]:
    """q, k and v, packed or side by side. With fewer key heads than query heads their rows do not match."""
    for name, module in modules.items():
        if isinstance(module, _ATTENTION):
            if module.in_proj_weight is not None:
                yield Target((_join(name, "in_proj_weight"),), "filter", 3)
            continue
        children = dict(module.named_children())
        packed = children.get("qkv")
        if (
            isinstance(packed, nn.Linear)
            and packed.out_features % 3 == 0
            and packed.out_features == 3 * _width_out(children)
        ):
            yield Target((_join(name, "qkv.weight"),), "filter", 3)
        for names in _TOGETHER:
            found = [children.get(part) for part in names]
            linears = [layer for layer in found if isinstance(layer, nn.Linear)]
            if len(linears) == 3 and len({layer.weight.shape for layer in linears}) == 1:
                yield Target(tuple(_join(name, f"{part}.weight") for part in names), "filter")


def _width_out(children: dict[str, nn.Module]) -> int:
    """What the output projection beside a packed q, k, v reads: a third of it, where all three have one width."""
    for part in ("proj", "out_proj", "o_proj"):
        layer = children.get(part)
        if isinstance(layer, nn.Linear):
            return layer.in_features
    return -1


def _embeds(target: Target, modules: dict[str, nn.Module], model: nn.Module) -> bool:
    weight = model.get_parameter(target.names[0])
    return any(isinstance(module, nn.Embedding) and module.weight is weight for module in modules.values())


def _inside(name: str, skip: set[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in skip)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
