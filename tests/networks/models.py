"""Whole models around a body: heads, token ids, two inputs, outputs in a dict."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Cross, GroupedAttention


class Head(nn.Module):
    """From a stream to numbers."""

    def __init__(self, body: nn.Module, how: str, width: int, outputs: int) -> None:
        super().__init__()
        self.body, self.how, self.out = body, how, nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.how == "mean":
            x = x.mean((2, 3)) if x.dim() == 4 else x.mean(1)
        elif self.how == "pool":
            x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        elif self.how == "flatten":
            x = x.flatten(1)
        elif self.how == "first":
            x = x[:, 0]
        return self.out(x)


class WithFeatures(nn.Module):
    """A dict of the numbers and of something on the way to them."""

    def __init__(self, head: Head, tap: int) -> None:
        super().__init__()
        self.head, self.tap = head, tap

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.head.body[: self.tap](x)
        return {"numbers": self.head(x), "features": features.relu()}


class Language(nn.Module):
    """Token ids in, logits out; the head may be the embedding itself, in one of the two ways of tying them."""

    def __init__(
        self, vocabulary: int, width: int, blocks: list[nn.Module], norm: nn.Module, *, tied: str, positions: int = 0
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(vocabulary, width), nn.ModuleList(blocks), norm
        self.pos = nn.Parameter(torch.randn(positions, width)) if positions else None
        self.tied = tied
        if tied != "function":
            self.head = nn.Linear(width, vocabulary, bias=tied == "no")
        if tied == "weight":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.pos is not None:
            x = x + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.tied == "function" else self.head(x)


class Block(nn.Module):
    """Attention and MLP on a stream, with norms before or after them."""

    def __init__(self, attention: GroupedAttention, mlp: nn.Module, norms: list[nn.Module], where: str) -> None:
        super().__init__()
        self.attention, self.mlp, self.norms, self.where = attention, mlp, nn.ModuleList(norms), where

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        one, two = self.norms
        if self.where == "parallel":
            y = one(x)
            return x + self.attention(y, mask) + self.mlp(two(x))
        if self.where == "post":
            x = one(x + self.attention(x, mask))
            return two(x + self.mlp(x))
        if self.where == "inside":
            x = x + one(self.attention(x, mask))
            return x + two(self.mlp(x))
        x = x + self.attention(one(x), mask)
        return x + self.mlp(two(x))


class TwoInputs(nn.Module):
    """Two streams of tokens; one looks at the other."""

    def __init__(self, ours: nn.Module, theirs: nn.Module, cross: Cross, after: nn.Module) -> None:
        super().__init__()
        self.ours, self.theirs, self.cross, self.after = ours, theirs, cross, after

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.theirs(memory)
        x = self.cross(self.ours(x), memory)
        return self.after(x), memory.mean(1)


class Fused(nn.Module):
    """Two inputs of the same batch: a vector steers an image (FiLM), or is added to it."""

    def __init__(self, image: nn.Module, vector: nn.Module, rest: nn.Module, how: str) -> None:
        super().__init__()
        self.image, self.vector, self.rest, self.how = image, vector, rest, how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.image(x), self.vector(y)[:, :, None, None]
        if self.how == "add":
            x = x + y
        elif self.how == "gate":
            x = x * torch.sigmoid(y)
        else:
            x = torch.cat([x, y.expand(-1, -1, *x.shape[2:])], 1)
        return self.rest(x).sigmoid().mean((2, 3))  # the mean of a norm over positions is 0, and rounding
