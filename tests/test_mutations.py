"""Planted bugs, one at a time: verification stops every one of them, on a network that is exact without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from check import TOLERANCE, assert_untouched, check, error, noisy
from nets import Net, dead, rand, unread
from networks import Attention, Branches, Multihead, Residual
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release import blocks, follow, rewrite
from squeeze_release.analyse import Analysis
from squeeze_release.labels import Grid, Live
from squeeze_release.modules import CompensatedLayerNorm
from squeeze_release.plan import Plan
from squeeze_release.rules import affine, attention, elementwise, norm, pool, shape

Patch = pytest.MonkeyPatch
Network = tuple[nn.Module, Tensor]


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put `change(original, *arguments)` in the place of a function or method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def nothing(*_: Any, **__: Any) -> None:
    return None


# ---------------------------------------------------------------------------------------------------------- networks


def hidden(act: type[nn.Module] = nn.Tanh) -> Network:
    """Unit 1 is a constant, unit 4 is not read."""
    net = noisy(nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, 3)))
    dead(net[0], 1)
    unread(net[2], 4)
    return net, rand(3, 4)


def images(between: nn.Module, **how: Any) -> Network:
    """Channel 1 is a constant; a convolution reads it."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 1), between, nn.Conv2d(4, 2, 3, **how)))
    dead(net[0], 1, bias=0.7)
    return net, rand(2, 3, 7, 7)


def normed(constants: tuple[int, ...] = (1, 2), unread_columns: tuple[int, ...] = (1, 2)) -> Network:
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    dead(net[0], *constants)
    unread(net[2], *unread_columns)
    return net, rand(3, 4)


def narrow_heads(style: str) -> Network:
    """Dimension 1 of the first head and 2 of the second: their queries are 0, and no one reads their values."""
    net = noisy(Attention(6, 2, 4, style))
    dead(net.q, 1, 6, bias=0.0)
    unread(net.proj, 1, 6)
    return net, rand(2, 5, 6)


def constant_values(scores: Callable[[Tensor], Tensor]) -> Network:
    """Written out: value channel 1 and key channel 2 are the same for every token."""
    parts = {name: nn.Linear(6, 4) for name in ("q", "k", "v")}
    net = noisy(
        Net(lambda s, x: s.out(scores(s.q(x) @ s.k(x).transpose(-2, -1)) @ s.v(x)), **parts, out=nn.Linear(4, 3))
    )
    dead(net.v, 1)
    dead(net.k, 2)
    return net, rand(2, 5, 6)


def meeting(code: Callable[..., Tensor], **parts: nn.Module) -> Network:
    """Two layers of 6 units side by side; unit 1 of one and unit 2 of the other are constants."""
    net = noisy(Net(code, one=nn.Linear(4, 6), two=nn.Linear(4, 6), out=nn.Linear(6, 3), **parts))
    dead(net.one, 1)
    dead(net.two, 2)
    return net, rand(3, 4)


def zero_meets_x() -> Network:
    net, x = meeting(lambda s, x: s.out(s.one(x) + s.two(x)))
    dead(net.one, 3, bias=0.0)
    return net, x


def sums_to_zero() -> Network:
    net, x = hidden()
    with torch.no_grad():
        net[0].weight[2] = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return net, x


def groups() -> Network:
    """The first group does not read its first channel, the second group not its last: no column goes from both."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=2)))
    with torch.no_grad():
        net[2].weight[:2, 0] = 0
        net[2].weight[2:, 2] = 0
    return net, rand(2, 3, 7, 7)


def half_read() -> Network:
    """Units 4 and 5 are read by the last two rows only."""
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    with torch.no_grad():
        net[2].weight[:2, 4:] = 0
    return net, rand(3, 4)


def unread_inputs() -> Network:
    net = noisy(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    return unread(net[0], 0, 3) and net, rand(3, 6)


def depthwise() -> Network:
    """The stream keeps all its channels; the depthwise filters 0 and 3 are dead and nobody reads them."""
    body = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1, groups=5), nn.Conv2d(5, 5, 1))
    net = noisy(nn.Sequential(nn.Conv2d(3, 5, 1), Residual(body), nn.Conv2d(5, 2, 1)))
    dead(body[0], 0, 3)
    unread(body[1], 0, 3)
    return net, rand(2, 3, 7, 7)


def dead_block() -> Network:
    body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))
    net = noisy(nn.Sequential(nn.Linear(4, 5), Residual(body), nn.Linear(5, 3)))
    dead(body[2], *range(5))
    return net, rand(3, 4)


def constant_block() -> Network:
    net = noisy(Net(lambda s, x: s.out(torch.cat([s.one(x), s.two(x)], -1)), one=nn.Linear(4, 4), two=nn.Linear(4, 3)))
    net.out = nn.Sequential(nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    dead(net.two, *range(3))
    return noisy(net), rand(3, 4)


def side_by_side() -> Network:
    net = noisy(nn.Sequential(Branches(nn.Linear(4, 3), nn.Linear(4, 3), -1), nn.Tanh(), nn.Linear(6, 3)))
    return unread(net[2], 1) and net, rand(3, 4)


def sliced() -> Network:
    """Units 2 to 5 are cut out by fixed numbers; unit 0 is read by nobody, 6 and 7 by another layer."""
    net = noisy(
        Net(
            lambda s, x: s.out(s.lin(x)[..., 2:6]) + s.all(s.lin(x)),
            lin=nn.Linear(4, 8),
            out=nn.Linear(4, 3),
            all=nn.Linear(8, 3),
        )
    )
    unread(net.all, 0)
    return net, rand(3, 4)


def positions() -> Network:
    """Position embeddings for 8 tokens, 5 of which the example has."""
    net = noisy(
        Net(lambda s, x: s.out(x + s.pos[:, : x.shape[1]]), pos=nn.Parameter(rand(1, 8, 4)), out=nn.Linear(4, 3))
    )
    return net, rand(2, 5, 4)


def called_twice() -> Network:
    """One layer reads two others, whose unit 1 is constant at different numbers."""
    net, x = meeting(lambda s, x: s.out(s.one(x)) + s.out(s.two(x)))
    dead(net.two, 1)
    return net, x


def multihead() -> Network:
    """Dimension 1 of the first head and 2 of the second: their keys are constant, and no one reads their values."""
    net = noisy(Multihead(8, 2))
    with torch.no_grad():
        net.attention.in_proj_weight[[9, 14]] = 0
    unread(net.attention.out_proj, 1, 6)
    return net, rand(2, 5, 8)


# --------------------------------------------------------------------------------------------------------- mutations


def shared_columns_anyhow(settle: Callable[..., None], grid: Grid, live: Live, least: int = 0) -> None:
    """Every group keeps any so many channels, as if they did not share their columns."""
    if grid.ragged or grid.inner is None:
        return settle(grid, live, least)
    width = max(least, int(live[grid.labels].sum(1).max()))
    return live.mark(grid.inner[:width], grid.where, "mutated")


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
    self.mean = self.mean + 0.1


def wrong_spread(merge: Callable[..., None], self: CompensatedLayerNorm, constants: Tensor) -> None:
    merge(self, constants.mean().expand(len(constants)))


def negated(find: Callable[..., Tensor | None], *args: Any) -> Tensor | None:
    found = find(*args)
    return None if found is None else -found


def rolled(index: Callable[..., None], plan: Plan, module: str, which: Tensor, *inputs: int) -> None:
    index(plan, module, which.roll(1), *inputs)


class Mutation(NamedTuple):
    plant: Callable[[Patch], None]
    build: Callable[[], Network]


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
    "groups share no columns": Mutation(change(Grid, "settle", shared_columns_anyhow), groups),
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
    "slices may begin anywhere": Mutation(becomes(follow, "_start", nothing), sliced),
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
        becomes(attention, "sums_to_one", lambda op: True), lambda: constant_values(torch.tanh)
    ),
    "every product goes into a softmax": Mutation(
        becomes(attention, "goes_into_softmax", lambda op: True), lambda: constant_values(F.relu)
    ),
    "narrow attention scales by its new width": Mutation(
        change(
            Plan,
            "attention",
            lambda plan, *args, head_dim, **how: plan(*args, head_dim=head_dim, **how | {"scale": head_dim**-0.5}),
        ),
        multihead,
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
    check(model, x)
    mutation.plant(monkeypatch)
    wrong = sr.squeeze(model, x, verify=False).model
    assert differs(model, wrong, x), "this mutation changes nothing here"
    with pytest.raises(sr.VerificationError):
        sr.squeeze(model, x)
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
