"""Planted bugs, one at a time: verification stops every one of them, on a network that is exact without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from check import TOLERANCE, assert_untouched, check, error
from mutants import (
    Network,
    called_twice,
    constant_block,
    constant_queries,
    constant_values,
    dead_block,
    depthwise,
    depthwise_on_constants,
    group_normed,
    grouped_queries,
    groups,
    half_read,
    hidden,
    images,
    meeting,
    multihead,
    narrow_heads,
    normed,
    padded,
    positions,
    rescaled,
    rms_normed,
    shuffled,
    side_by_side,
    sliced,
    sums_to_zero,
    two_norms,
    unaligned,
    unread_inputs,
    zero_meets_x,
)
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release import rewrite
from squeeze_release.analyse import Analysis, blocks
from squeeze_release.facts import Span
from squeeze_release.follow import fitting
from squeeze_release.labels import Grid, Live
from squeeze_release.modules import CompensatedLayerNorm, CompensatedRMSNorm
from squeeze_release.plan import Plan
from squeeze_release.rules import affine, attention, carriers, elementwise, groupnorm, matmul, norm, pool, shape
from squeeze_release.rules.carriers import Carried

Patch = pytest.MonkeyPatch


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, *arguments)` in the place of a function or method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def nothing(*_: Any, **__: Any) -> None:
    return None


# --------------------------------------------------------------------------------------------------------- mutations


def shared_columns_anyhow(wanted: Callable[..., Tensor], grid: Grid, *args: Any) -> Tensor:
    """Every group keeps any so many channels, as if nothing tied their columns together."""
    return wanted(replace(grid, ragged=True), *args)


def columns_of_the_first(columns_of_groups: Callable[..., Tensor], weight: Tensor, columns: Tensor) -> Tensor:
    return columns_of_groups(weight, columns[:1].expand_as(columns))


def filled_with_zeros(with_place: Callable[..., nn.Module], module: nn.Module, live: Tensor) -> nn.Module:
    new = with_place(module, live)
    new.fill.data.zero_()
    return new


def larger_factors(carried: Callable[..., Carried | None], *args: Any) -> Carried | None:
    found = carried(*args)
    return found and replace(found, factors=1.1 * found.factors)


def one_function(span: Callable[..., Span | None], *args: Any) -> Span | None:
    found = span(*args)
    return found and replace(found, parts=(sum(found.parts[1:], found.parts[0]),))


def dealt_out(copied: Callable[..., Tensor], op: Any, ctx: Any, source: Tensor, times: int, *copies: Any) -> Tensor:
    """Copies of key heads in turn, 0 1 2 0 1 2, instead of 0 0 1 1 2 2."""
    table = copied(op, ctx, source, times, *copies)
    return table.reshape(len(source), times, -1).transpose(0, 1).reshape(table.shape)


def placed_elsewhere(with_place: Callable[..., nn.Module], module: nn.Module, live: Tensor) -> nn.Module:
    new = with_place(module, live)
    new.place = new.place.roll(1)
    return new


def add_takes_zeros(
    value: Callable[..., Tensor], rule: Any, op: Any, facts: list[Any], shape: tuple[int, ...]
) -> Tensor:
    result = value(rule, op, facts, shape)
    for fact in facts if op.name.startswith("aten.add") else ():
        result = torch.where(fact.value == 0, 0.0, result)
    return result


def heads_crossed(contract: Callable[..., Any], rule: Any, op: Any, ctx: Any, *operands: Any) -> Any:
    """Keys of one head are bound to queries of another."""
    with pytest.MonkeyPatch.context() as patch:
        merge = ctx.labels.merge
        patch.setattr(ctx.labels, "merge", lambda a, b: merge(a, b.flip(0)))
        return contract(rule, op, ctx, *operands)


def without_padding(forward: Callable[..., Any], rule: Any, op: Any, ctx: Any) -> Any:
    return forward(rule, replace(op, given={**op.given, "count_include_pad": False}), ctx)


def with_sums(matrix: Callable[..., Tensor], rule: Any, weight: Tensor, geometry: Any) -> Tensor:
    """A row whose entries sum to 0 is taken for a row of zeros."""
    rows = matrix(rule, weight, geometry)
    return rows * (rows.sum((2, 3), keepdim=True) != 0)


def first_half(needed: Callable[..., Tensor], live: Live, labels: Tensor) -> Tensor:
    return needed(live, labels) & (torch.arange(len(labels)) < len(labels) // 2)


def wrong_mean(merge: Callable[..., None], self: CompensatedLayerNorm, constants: Tensor) -> None:
    merge(self, constants)
    self.statistics = self.statistics + torch.tensor([0, 0.1, 0])


def wrong_spread(merge: Callable[..., None], self: CompensatedLayerNorm, constants: Tensor) -> None:
    merge(self, constants.mean().expand(len(constants)))


def wrong_count(merge: Callable[..., None], self: CompensatedRMSNorm, constants: Tensor) -> None:
    merge(self, constants)
    self.statistics = self.statistics - torch.tensor([1, 0])


def negated(find: Callable[..., Tensor | None], *args: Any) -> Tensor | None:
    found = find(*args)
    return None if found is None else -found


def rolled(index: Callable[..., None], plan: Plan, module: str, which: Tensor, *inputs: int) -> None:
    index(plan, module, which.roll(1), *inputs)


class Mutation(NamedTuple):
    plant: Callable[[Patch], None]
    build: Callable[[], Network]
    compaction: str | None = None


def change(owner: Any, name: str, how: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: around(patch, owner, name, how)


def becomes(owner: Any, name: str, what: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, what)


MUTATIONS = {
    "a constant is folded as 0": Mutation(becomes(Plan, "fold", nothing), hidden),
    "an activation leaves constants as they are": Mutation(
        change(elementwise.Unary, "forward", lambda forward, rule, op, ctx: next(op.facts())), hidden
    ),
    "a row that sums to 0 is a row of zeros": Mutation(change(affine.Affine, "matrix", with_sums), sums_to_zero),
    "half of the rows read nothing": Mutation(change(Live, "needed", first_half), half_read),
    "one call speaks for all": Mutation(
        change(Analysis, "agreed", lambda agreed, ctx, reader: ctx.constants[reader][0]), called_twice
    ),
    "padding is overlooked": Mutation(
        change(affine.Convolution, "geometry", lambda geometry, *args: replace(geometry(*args), padded=False)),
        lambda: images(nn.Tanh(), padding=1),
    ),
    "average pooling does not count its padding": Mutation(
        change(pool.Pool, "forward", without_padding), lambda: images(nn.AvgPool2d(3, 1, 1))
    ),
    "all groups keep the columns of the first": Mutation(
        change(rewrite, "_columns_of_groups", columns_of_the_first), groups
    ),
    "a shuffle binds no columns": Mutation(change(Grid, "_wanted", shared_columns_anyhow), shuffled),
    "a carrier takes over too much": Mutation(change(affine, "carried", larger_factors), padded),
    "a carrier takes over nothing": Mutation(becomes(Plan, "carry", nothing), padded),
    "nobody carries": Mutation(becomes(carriers, "settle", nothing), padded),
    "a depthwise convolution gathers its carrier as it is": Mutation(
        becomes(Plan, "scale", nothing), depthwise_on_constants
    ),
    "the mean of a layer norm is no function of the position": Mutation(
        change(norm.LayerNorm, "span", lambda span, *args: span(*args)[:2]),
        lambda: normed(constants=(1, 2, 4), unread_columns=(3,)),
    ),
    "an RMS norm passes constants on with their weight left out": Mutation(
        becomes(norm.RMSNorm, "_weight", lambda rule, op, width: torch.ones(width, dtype=torch.float64)), rms_normed
    ),
    "the index of a Linear is shifted": Mutation(change(Plan, "index", rolled), unread_inputs),
    "the index of a depthwise convolution is shifted": Mutation(change(Plan, "depthwise", rolled), depthwise),
    "batch norm forgets its running mean": Mutation(
        change(norm, "numbers", lambda numbers, op, name, *rest: numbers(op, name, *rest) * (name != "running_mean")),
        lambda: images(nn.BatchNorm2d(4)),
    ),
    "layer norm does not need what varies": Mutation(
        becomes(norm.LayerNorm, "need", nothing), lambda: normed(unread_columns=(1, 2, 4))
    ),
    "a compensated norm has a wrong mean": Mutation(change(CompensatedLayerNorm, "merge", wrong_mean), normed),
    "a compensated norm has a wrong spread": Mutation(change(CompensatedLayerNorm, "merge", wrong_spread), normed),
    "a scale behind a norm changes nothing": Mutation(change(Span, "scaled", lambda _, span, *args: span), rescaled),
    "norms side by side share their functions": Mutation(change(shape.Cat, "_span", one_function), two_norms),
    "a constant query takes over too much": Mutation(change(attention, "carried", larger_factors), constant_queries),
    "a compensated RMS norm has wrong squares": Mutation(
        change(CompensatedRMSNorm, "merge", lambda merge, norm, constants: merge(norm, 1.1 * constants)), rms_normed
    ),
    "a compensated RMS norm counts one channel less": Mutation(
        change(CompensatedRMSNorm, "merge", wrong_count), rms_normed
    ),
    "a group norm has twice as many groups": Mutation(
        change(groupnorm.GroupNorm, "groups_left", lambda left, *args: 2 * left(*args)), lambda: group_normed(2, 3)
    ),
    "a group norm does not need all of a group": Mutation(
        becomes(groupnorm.GroupNorm, "need", nothing), lambda: group_normed(0, 2, 4, 6)
    ),
    "a sum merges nothing": Mutation(
        change(elementwise, "_join", lambda join, op, ctx, result, layer: result or [layer]),
        lambda: meeting(lambda s, x: s.out(s.one(x) + s.two(x))),
    ),
    "0 + x is 0": Mutation(change(elementwise.Combine, "_value", add_takes_zeros), zero_meets_x),
    "a concat labels its pieces the wrong way round": Mutation(
        change(
            shape.Cat, "_side_by_side", lambda lay, rule, op, ctx, facts, *rest: lay(rule, op, ctx, facts[::-1], *rest)
        ),
        side_by_side,
    ),
    "slices may begin anywhere": Mutation(becomes(fitting, "_start", nothing), sliced),
    "positions that the example does not reach go": Mutation(
        change(shape.Move, "_source", lambda source, rule, op, ctx, x: x), positions
    ),
    "the softmax scale is not made good": Mutation(
        becomes(Plan, "scale_rows", nothing), lambda: narrow_heads("separate")
    ),
    "heads of q and k are crossed": Mutation(
        change(attention.Contraction, "contract", heads_crossed), lambda: narrow_heads("matmul")
    ),
    "every product is weighted by a softmax": Mutation(
        becomes(matmul, "sums_to_one", lambda op: True), lambda: constant_values(torch.tanh)
    ),
    "every product goes into a softmax": Mutation(
        becomes(matmul, "goes_into_softmax", lambda op: True), lambda: constant_values(F.relu)
    ),
    "key heads are dealt out to queries in turn": Mutation(change(attention, "copied", dealt_out), grouped_queries),
    "narrow attention scales by its new width": Mutation(
        change(
            Plan,
            "attention",
            lambda plan, *args, head_dim, **how: plan(*args, head_dim=head_dim, **how | {"scale": head_dim**-0.5}),
        ),
        multihead,
    ),
    "a compacted layer gathers other columns": Mutation(change(Plan, "index", rolled), unaligned, "index"),
    "a compacted layer places its rows elsewhere": Mutation(
        change(rewrite, "with_place", placed_elsewhere), unaligned, "index"
    ),
    "a compacted layer forgets the constants it does not compute": Mutation(
        change(rewrite, "with_place", filled_with_zeros), unaligned, "index"
    ),
    "a shift has the wrong sign": Mutation(change(blocks, "_shift", negated), dead_block),
    "a constant block has other numbers": Mutation(
        change(rewrite, "Constant", lambda make, numbers, **how: make(numbers.flip(0), **how)), constant_block
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: Patch) -> None:
    mutation = MUTATIONS[name]
    model, x = mutation.build()
    model = model.double().eval()
    before, modes = copy.deepcopy(model.state_dict()), {path: m.training for path, m in model.named_modules()}
    check(model, x, compaction=mutation.compaction)
    mutation.plant(monkeypatch)
    wrong = sr.squeeze(model, x, verify=False, compaction=mutation.compaction).model
    assert differs(model, wrong, x), "this mutation changes nothing here"
    with pytest.raises(sr.VerificationError):
        sr.squeeze(model, x, compaction=mutation.compaction)
    assert_untouched(model, before, modes)


@torch.no_grad()
def differs(old: nn.Module, new: nn.Module, x: Tensor) -> bool:
    """On the example, or on one with another token more."""
    for inputs in (x, torch.cat([x, x[:, :1]], 1)) if x.dim() == 3 else (x,):
        want = old(inputs)
        try:
            got = new(inputs)
        except RuntimeError:
            return True
        if got.shape != want.shape or not error(want, got) <= 1e4 * TOLERANCE:
            return True
    return False


def test_the_networks_are_no_mutants() -> None:
    """What `differs` says of a right result."""
    model, x = hidden()
    model = model.double().eval()
    assert not differs(model, sr.squeeze(model, x).model, x)
