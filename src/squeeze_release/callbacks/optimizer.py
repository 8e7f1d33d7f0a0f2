"""An optimizer follows a network to its new parameters.

It stays the same object, so that schedulers and loops that hold it go on. What it keeps for a parameter (momenta) is
cut like the parameter: the rows and columns that stayed. A parameter for which that is not possible starts afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..report import Report

Group = list[nn.Parameter]


@torch.no_grad()
def rebind(optimizer: Optimizer, before: Mapping[str, nn.Parameter], model: nn.Module, report: Report) -> None:
    """Let `optimizer` train the parameters of `model`, which had those in `before` (under all their names).

    Parameters of other models that it trains stay. New ones, such as a bias that took up a constant, join the group of
    those of the same name.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in before.items():
        names.setdefault(id(parameter), []).append(name)
    groups: list[Group] = []
    for group in optimizer.param_groups:
        kept: Group = []
        for old in group["params"]:
            mine = names.get(id(old))
            new = old if mine is None else next((now[name] for name in mine if name in now), None)
            if new is not old:
                state = optimizer.state.pop(old, None)
                if new is not None and state and (cut := _cut_state(state, old, new, mine or [], report)):
                    optimizer.state[new] = cut
            if new is not None and all(new is not other for other in kept):
                kept.append(new)
        groups.append(kept)
    _add_new(groups, before, model)
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = kept


def _cut_state(
    state: Mapping[str, Any], old: Tensor, new: Tensor, names: list[str], report: Report
) -> dict[str, Any] | None:
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            value = _cut(value, names, report) if value.shape == old.shape else value
            if value.shape != new.shape:
                return None  # kept in a shape of its own (Adafactor), or of a parameter that was made anew
        cut[key] = value
    return cut


def _cut(value: Tensor, names: list[str], report: Report) -> Tensor:
    for name in names:
        for dim, index in report.slices.get(name, {}).items():
            value = value.index_select(dim, index.to(value.device))
        columns = report.group_columns.get(name)
        if columns is not None and len(columns) == len(value):
            columns = columns.to(value.device).reshape(*columns.shape, *[1] * (value.dim() - 2))
            value = value.gather(1, columns.expand(-1, -1, *value.shape[2:]))
        if name in report.slices or columns is not None:
            break  # tied names are cut once
    return value


def _add_new(groups: list[Group], before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Where an optimizer made for the narrow model would have them: a checkpoint is resumed with such a one."""
    order = list(model.named_parameters())
    place = {id(parameter): i for i, (_, parameter) in enumerate(order)}
    home = {id(parameter): i for i, group in enumerate(groups) for parameter in group}
    for i, (name, parameter) in enumerate(order):
        if name in before or not parameter.requires_grad or id(parameter) in home:
            continue
        group = groups[_home(name, order, home)]
        later = [j for j, other in enumerate(group) if place.get(id(other), -1) > i]
        group.insert(later[0] if later else len(group), parameter)
        home[id(parameter)] = next(j for j, each in enumerate(groups) if each is group)


def _home(name: str, order: list[tuple[str, nn.Parameter]], home: Mapping[int, int]) -> int:
    """The group of the nearest parameter with the same last name, or of the nearest at all."""
    at = [n for n, _ in order].index(name)
    there = [(n, abs(i - at), home[id(p)]) for i, (n, p) in enumerate(order) if id(p) in home]
    alike = [entry for entry in there if entry[0].rpartition(".")[2] == name.rpartition(".")[2]]
    return min(alike or there, key=lambda entry: entry[1])[2] if there else 0
