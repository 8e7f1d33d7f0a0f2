"""Tensors that the code makes itself, and layers that are kept as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..facts import Fact
from ..labels import Live
from .base import Facts, Op, Rule, blank, rule
from .grouped import copies_along, keep_unbound

if TYPE_CHECKING:
    from ..analyse import Analysis


@rule("arange", "linspace", "eye", "scalar_tensor", "tril_indices", "triu_indices", "new_empty", "empty")
class Create(Rule):
    """Made from numbers alone, or like another tensor in device and type: reads no channel, and has fixed extents.

    Exact: always. Where its extent comes from a width, the code is tried with the new one (`follow/`).
    Keeps: what its result meets, for that has a fixed width.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        return blank(op)


@rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
class Fill(Rule):
    """One number everywhere: a constant at every shape. In front of its last two dimensions it may go along with what
    it meets: T5 makes a bias of zeros, one for each head.

    Exact: every copy of a number is the number.
    Keeps: its extent where no channel is bound to it, or where the number is computed.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        out = blank(op)
        number = op.given.get("fill_value", 1.0 if "ones" in op.name else 0.0)
        if not isinstance(out, Fact) or not isinstance(number, (int, float)):
            return super().forward(op, ctx)
        value = torch.full((1,) * len(out.shape), float(number), dtype=torch.float64)
        layers = copies_along(op, ctx, out.shape, list(range(1, len(out.shape) - 2)))
        return replace(out, layers=tuple(layers), numbers=value.expand(out.shape))

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        keep_unbound(op, live)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
class Recurrent(Rule):
    """A recurrent layer: every unit of its state feeds every other one a step later. It keeps its widths, and so does
    what feeds it; what reads its output may still lose outputs of its own.

    Exact: always, for nothing changes here.
    Keeps: all of it.
    """

    reason = "a recurrent layer keeps its widths, and those of its input"
