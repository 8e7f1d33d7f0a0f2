"""Carriers: channels that stay so that others, whose numbers they determine, can go.

A channel may be no constant and still be known: x_k = o_k + F_k1 f_1 + .. + F_kr f_r, where the f are functions of the
position that all channels share. In front of zero padding f is the padded 1; in front of a layer that can take no bias,
1 itself; behind a layer norm it is 1/sigma and mu/sigma; behind an RMS norm 1/rms. Then r channels carry all others:

    F_k = sum_i a_ki F_i   =>   x_k = o_k + sum_i a_ki (x_i - o_i)

so a reader W drops column k, adds a_ki W[:, k] to column i and W[:, k] (o_k - sum_i a_ki o_i) to its bias. Carriers are
chosen for conditioning, the largest residual first, which keeps |a| near 1; what would need a larger factor than
`MOST_GROWTH` asks for a carrier of its own.

Exact: at every position, so at every resolution, for the f are never evaluated.
Keeps: what passed an op that is not linear since (relu of a padded constant), and what is read by a weight that others
read too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..facts import Fact, uniform
from ..labels import Live

MOST_GROWTH = 1e3
CARRIES = "carries constants that no bias can take: zero padding or a norm makes them vary, or there is no such bias"
_ROUNDING = 1e-13
_GOOD = 0.01  # a candidate with this share of the best one's residual will do


@dataclass(frozen=True)
class Request:
    """Channels one of which must stay, with a score for each: how well it would carry the others."""

    labels: Tensor
    scores: Tensor
    where: str


@dataclass(frozen=True)
class Carried:
    """Which columns go into which, and how much of them."""

    gone: Tensor
    carriers: Tensor
    factors: Tensor  # gone x carriers


def known(fact: Fact, dim: int, *, padded: bool, carriers: bool) -> Tensor:
    """Per channel (offset, F_1 .. F_r), NaN where it is not known. Zero padding makes the offset a function too."""
    constant = uniform(fact.value, dim)
    columns = [constant]
    if fact.span is not None and fact.span.dim == dim % len(fact.shape):
        offset = uniform(fact.span.offset, dim)
        columns = [torch.where(constant.isnan(), offset, constant)]
        columns += [torch.where(constant.isnan(), uniform(part, dim), 0.0) for part in fact.span.parts]
    table = torch.stack(columns, 1)
    if padded:
        table = offset_carried(table)
    lost = table.isnan().any(1)
    if not carriers:
        lost |= (table[:, 1:] != 0).any(1)
    return torch.where(lost[:, None], torch.nan, table)


def offset_carried(table: Tensor) -> Tensor:
    """The same with the offset as one more function: behind padding it is none, or there is no bias to take it."""
    offset = table[:, :1]
    return torch.cat([torch.where(offset.isnan(), offset, 0.0), table[:, 1:], offset], 1)


def express(wanted: Tensor, have: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of `wanted` as combinations of few rows of `have`: (rows of have, factors, what is left of wanted)."""
    chosen: list[int] = []
    basis: list[Tensor] = []
    left, spare = wanted.clone(), have.clone()
    for _ in range(wanted.size(1)):
        if not len(have) or not len(wanted):
            break
        size, best = spare.norm(dim=1).max(0)
        if float(left.norm(dim=1).max()) <= _ROUNDING * float(wanted.norm(dim=1).max()):
            break
        if float(size) * MOST_GROWTH < float(left.norm(dim=1).max()):
            break
        chosen.append(int(best))
        direction = spare[best] / size
        basis.append(direction)
        left = left - (left @ direction)[:, None] * direction
        spare = spare - (spare @ direction)[:, None] * direction
    picked = torch.tensor(chosen, dtype=torch.int64)
    if not chosen:
        return picked, wanted.new_zeros(len(wanted), 0), left
    factors = torch.linalg.lstsq(have[picked].T, wanted.T, driver="gelsd").solution.T
    return picked, factors, wanted - factors @ have[picked]


def request(table: Tensor, labels: Tensor, read: Tensor, live: Live, where: str) -> Iterator[Request]:
    """Ask for one more carrier if the living channels do not carry the dead ones that are read."""
    functions = table[:, 1:]
    can = ~functions.isnan().any(1) & (functions != 0).any(1)
    alive = live[labels]
    wanted = (read & can & ~alive).nonzero().flatten()
    if not len(wanted):
        return
    _, _, left = express(functions[wanted], functions[can & alive])
    size = left.norm(dim=1)
    if float(size.max()) > _ROUNDING * float(functions[wanted].norm(dim=1).max()):
        yield Request(labels[wanted], size / size.max(), where)


def carried(table: Tensor, alive: Tensor, read: Tensor) -> Carried | None:
    """The columns that go, and what becomes of them."""
    functions = table[:, 1:]
    can = ~functions.isnan().any(1) & (functions != 0).any(1)
    gone, have = (read & can & ~alive).nonzero().flatten(), (can & alive).nonzero().flatten()
    if not len(gone):
        return None
    picked, factors, _ = express(functions[gone], functions[have])
    return Carried(gone, have[picked], factors)


def settle(requests: list[Request], live: Live) -> None:
    """Let the fewest channels stay that serve all requests: first those that many readers could use."""
    if not requests:
        return
    votes = torch.zeros(len(live.root), dtype=torch.float64)
    for asked in requests:
        good = asked.scores >= _GOOD
        votes.index_add_(0, live.root[asked.labels[good]], 1 + asked.scores[good] / (2 * len(requests)))
    for asked in requests:
        good = asked.labels[asked.scores >= _GOOD]
        if not bool(live[good].any()):
            best = good[votes[live.root[good]].argmax()]
            live.mark(best[None], asked.where, CARRIES)
