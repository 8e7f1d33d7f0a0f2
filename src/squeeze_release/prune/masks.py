"""Masks: which weights are zero, kept so after every optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import check_choice
from .targets import Target

SCOPES = ("global", "layer")


class Keeper:
    """Weights of a model of which some are zero, and stay so."""

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        self._weights = weights
        self._factors: list[Tensor] | None = None  # one a weight; None while nothing is pruned

    @property
    def names(self) -> list[str]:
        """The parameters that scores are needed of."""
        return list(self._weights)

    @property
    def total(self) -> int:
        """All weights that there are to prune."""
        return sum(weight.numel() for weight in self._weights.values())

    def named(self) -> dict[str, Tensor]:
        """Parameter -> mask of its own shape, as `torch.nn.utils.prune.custom_from_mask` takes it."""
        raise NotImplementedError

    def take_zeros(self) -> None:
        """Units that are zero already count as pruned from now on."""
        raise NotImplementedError

    def changed(self) -> None:
        """Zero what was pruned just now."""
        self._factors = None
        self.keep()

    @torch.no_grad()
    def keep(self, *_: Any) -> None:
        """Zero what is pruned: a hook for `optimizer.register_step_post_hook`, of a few kernels for all weights."""
        if self._factors is None:
            masks = self.named()
            self._factors = [masks[name].to(weight.dtype) for name, weight in self._weights.items()]
        if self._factors:
            torch._foreach_mul_(list(self._weights.values()), self._factors)


class Masks(Keeper):
    """Which units of a model are alive. What is pruned is zero in the weights themselves: anyone can read it there.

    >>> net = nn.Linear(4, 2)
    >>> masks = Masks(net, [Target(("weight",))])
    >>> masks.prune({"weight": net.weight.abs()}, keep=0.25)
    >>> masks.alive, int(net.weight.count_nonzero())
    (2, 2)
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target]) -> None:
        super().__init__({name: model.get_parameter(name) for target in targets for name in target.names})
        self.targets = list(targets)
        self.units = [self._ones(target) for target in targets]

    def _ones(self, target: Target) -> Tensor:
        weights = {name: torch.ones_like(self._weights[name]) for name in target.names}
        return target.unit_scores(weights) > 0

    @property
    def alive(self) -> int:
        """The paper's mask-alive count."""
        return sum(int(units.sum()) * slots for units, slots in zip(self.units, self._slots(), strict=True))

    def named(self) -> dict[str, Tensor]:
        return {
            name: target.expand(units, self._weights[name]).clone()
            for target, units in zip(self.targets, self.units, strict=True)
            for name in target.names
        }

    @torch.no_grad()
    def prune(self, scores: Mapping[str, Tensor], keep: float, scope: str = "global") -> None:
        """Zero the units of the lowest scores, until at most `keep` of all weights are alive. What is dead stays dead.

        scope: "global", one ranking in which a unit takes as many slots as it has weights; or "layer" by layer.
        """
        check_choice("scope", scope, SCOPES, of="Masks.prune", consequence="nothing was pruned")
        if not self.targets:
            return
        ranked = [
            torch.where(units, target.unit_scores(scores).double(), -torch.inf)
            for target, units in zip(self.targets, self.units, strict=True)
        ]
        slots = self._slots()
        if scope == "global":
            self.units = _choose(ranked, self.units, slots, keep)
        else:
            each = zip(ranked, self.units, slots, strict=True)
            self.units = [_choose([score], [units], [slot], keep)[0] for score, units, slot in each]
        self.changed()

    @torch.no_grad()
    def take_zeros(self) -> None:
        sizes = {name: weight.abs() for name, weight in self._weights.items()}
        self.units = [
            units & (target.unit_scores(sizes) > 0) for target, units in zip(self.targets, self.units, strict=True)
        ]
        self.changed()

    def state(self) -> dict[str, Tensor]:
        return {str(i): units for i, units in enumerate(self.units)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.units = [state[str(i)].to(units.device) for i, units in enumerate(self.units)]
        self._factors = None

    def _slots(self) -> list[int]:
        return [target.slots(self._weights[target.names[0]]) for target in self.targets]


def _choose(scores: list[Tensor], alive: list[Tensor], slots: list[int], keep: float) -> list[Tensor]:
    """The units that stay: the best ones, as many as fit into `keep` of all slots."""
    flat = torch.cat([score.flatten() for score in scores])
    sizes = torch.cat(
        [torch.full((score.numel(),), slot, device=flat.device) for score, slot in zip(scores, slots, strict=True)]
    )
    room = round(keep * float(sizes.sum()))
    order = flat.argsort(descending=True, stable=True)
    stays = torch.zeros_like(flat, dtype=torch.bool)
    stays[order] = sizes[order].cumsum(0) <= room
    parts = stays.split([score.numel() for score in scores])
    return [part.view_as(units) & units for part, units in zip(parts, alive, strict=True)]
