"""What dies of an attention: a head, and the same dimensions of q, k and v in every head."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from attentions import Attention
from torch import Tensor

Rows = dict[str, Tensor]


@dataclass
class Group:
    """Rows that are dead together or not at all. `unread` are the partners that must have become unread."""

    kind: str
    attention: Attention
    zero: Rows
    unread: Rows = field(default_factory=dict)
    bias_too: bool = False
    parts: Rows = field(default_factory=dict)  # the same rows by part: a bias of q may be a parameter of its own
    otherwise: Group | None = None  # to be tried where this is not dead
    tied: bool = False  # stands and falls with the other dimensions of its attention


@dataclass
class Heads:
    """Random heads and dimensions of attentions."""

    generator: torch.Generator
    share: float
    rotary: bool
    masked: bool  # a value under a mask from outside is constant only if it is 0: a row may be masked throughout

    def free_dimensions(self, found: Attention) -> bool:
        """Whether single dimensions of heads can go: a rotation or a norm over them ties them together."""
        divisible = min(found.size, found.qk_size) >= 8 and found.size % 4 == found.qk_size % 4 == 0
        return bool(
            divisible and found.q and found.k and found.v and not (self.rotary or found.normed or found.over_channels)
        )

    def keeps_pace(self, found: Attention) -> bool:
        """Whether all heads together can become narrower by a quarter."""
        return self.free_dimensions(found) or (found.heads % 4 == 0 and found.heads == found.kv_heads)

    def quarter(self, found: Attention) -> Tensor:
        """The columns of the output that read a quarter of the heads."""
        picked = torch.randperm(found.heads, generator=self.generator)[: found.heads // 4]
        return torch.zeros(found.heads, found.size, dtype=torch.bool).index_fill(0, picked, True).flatten()

    def head(self, found: Attention, by_value: bool) -> Group | Tensor:
        """One head, or all that share a key: rows of v, or the columns of the output that read it."""
        head = 0 if found.bound else int(torch.randint(found.kv_heads, (), generator=self.generator))
        size = found.size
        if by_value and found.v:
            rows = torch.zeros(found.kv_heads * size, dtype=torch.bool)
            rows[head * size : (head + 1) * size] = True
            return _chain(self._options("head", found, [({"v": rows}, {}, self.masked)]))
        columns, share = torch.zeros(found.width, dtype=torch.bool), found.heads // found.kv_heads * size
        columns[head * share : (head + 1) * share] = True
        return columns

    def dimensions(self, found: Attention, zero_q: bool) -> list[Group]:
        """The same dimensions in every head, of v, and of q and k.

        Of these it is enough that q is 0, or that k is the same for every key. Cosine attention needs both to be 0.
        """
        v, dims = self._pick(found.size), self._pick(found.qk_size)
        q, k = {"q": dims.repeat(found.heads)}, {"k": dims.repeat(found.kv_heads)}
        ways: list[tuple[Rows, Rows, bool]] = [(q, k, True), (k, q, False)]
        ways = [*(ways if zero_q else ways[::-1]), ({**q, **k}, {**q, **k}, True)]
        return [
            _chain(self._options("v", found, [({"v": v.repeat(found.kv_heads)}, {}, self.masked or found.mixed)])),
            _chain(self._options("qk", found, ways)),
        ]

    def _pick(self, size: int) -> Tensor:
        picked = torch.randperm(size, generator=self.generator)[: max(1, int(size * self.share))]
        return torch.zeros(size, dtype=torch.bool).index_fill(0, picked, True)

    def _options(self, kind: str, found: Attention, ways: list[tuple[Rows, Rows, bool]]) -> Iterator[Group]:
        """Every way, for every layout: q, k and v apart, packed part by part, or packed head by head."""
        tied = kind != "head" and (found.packed or found.derived)
        for zero, unread, bias_too in ways:
            for by_head in (False, True) if found.packed else (False,):
                zero_here, unread_here = found.place(zero, by_head), found.place(unread, by_head)
                yield Group(kind, found, zero_here, unread_here, bias_too, zero, tied=tied)


def _chain(options: Iterator[Group]) -> Group:
    every = list(options)
    for one, other in itertools.pairwise(every):
        one.otherwise = other
    return every[0]
