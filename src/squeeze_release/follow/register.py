"""Users name the attributes of their own attention classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..analyse.blocks import within
from ..errors import InputError

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..labels import Live


@dataclass(frozen=True)
class Names:
    """Which attributes of a class hold what."""

    heads: str | None
    head_dim: str | None
    kv_heads: str | None

    @property
    def all(self) -> set[str]:
        return {name for name in (self.heads, self.head_dim, self.kv_heads) if name is not None}


_REGISTERED: dict[type[nn.Module], Names] = {}


def register_attention(
    cls: type[nn.Module], *, heads: str | None = None, head_dim: str | None = None, kv_heads: str | None = None
) -> None:
    """Name the int attributes by which an attention class lays out its heads.

    Most classes need no words: `squeeze` sets the attributes that have the value of a width that changed, and looks
    whether the code follows. Where several attributes have the same value, or one only looks like a width, say which is
    which. The named attributes then follow the heads, and no other attribute of the class is touched. Subclasses count.

    Args:
        heads: the number of query heads.
        head_dim: the width of a query or key head.
        kv_heads: the number of key and value heads, for grouped queries.

    >>> import torch, squeeze_release as sr
    >>> class MyAttention(torch.nn.Module):
    ...     def __init__(self, dim=8, heads=4):
    ...         super().__init__()
    ...         self.n, self.top_k = heads, 4      # top_k has nothing to do with heads
    ...         self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
    ...     def forward(self, x):
    ...         q, k, v = self.qkv(x).unflatten(-1, (3, self.n, -1)).permute(2, 0, 3, 1, 4)
    ...         return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    >>> sr.register_attention(MyAttention, heads="n")
    >>> net = MyAttention()
    >>> with torch.no_grad():
    ...     _ = net.out.weight[:, :2].zero_()      # nothing of the first head is read
    >>> small, _ = sr.squeeze(net, torch.randn(2, 5, 8))
    >>> small.n, small.top_k
    (3, 4)
    """
    names = Names(heads, head_dim, kv_heads)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or not names.all:
        raise InputError(
            f"register_attention needs a subclass of nn.Module and at least one name, got {cls!r}",
            where="register_attention(cls, heads=, head_dim=, kv_heads=)",
            consequence="nothing was registered",
            remedy='name the attributes, as in register_attention(MyAttention, heads="num_heads")',
        )
    _REGISTERED[cls] = names


def registered(module: nn.Module) -> Names | None:
    return next((_REGISTERED[cls] for cls in type(module).__mro__ if cls in _REGISTERED), None)


def named_attributes(ctx: Analysis, live: Live) -> dict[str, dict[str, int]]:
    """The new values of the attributes that users named, module by module."""
    result: dict[str, dict[str, int]] = {}
    for path, module in ctx.model.named_modules():
        names = registered(module)
        if names is None or (table := next(_tables(ctx, path), None)) is None:
            continue
        heads, width = _size(table, live)
        kept = [_size(source, live)[0] for source in _sources(ctx, path)]
        new = {names.heads: heads, names.head_dim: width, names.kv_heads: kept[0] if kept else heads}
        result[path] = {name: value for name, value in new.items() if name is not None}
    return result


def _size(table: Tensor, live: Live) -> tuple[int, int]:
    """Heads that stay, and their width; a head that stands in the table for every sample counts once."""
    alive = live[torch.unique(table, dim=0)]
    return int(alive.any(1).sum()), int(alive.sum(1).max())


def _tables(ctx: Analysis, path: str) -> Iterator[Tensor]:
    for op in ctx.ops:
        if within(op.module, path):
            table = op.memo.get("qk", op.memo.get("table"))
            if isinstance(table, Tensor):
                yield table


def _sources(ctx: Analysis, path: str) -> Iterator[Tensor]:
    for op in ctx.ops:
        if within(op.module, path):
            yield from op.memo.get("sources", ())
