"""Who computes with a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import compact
from ..rules import RULES
from ..rules.elementwise import Identity
from ..rules.shape import Cat, Move, Pieces, Stack

if TYPE_CHECKING:
    from .analysis import Analysis

HANDS_ON = (Move, Pieces, Cat, Stack, Identity)


def count_readers(ctx: Analysis) -> tuple[Tensor, Tensor]:
    """For every label the first op that reads it as an activation (-1: none), and whether there are several."""
    first = torch.full((len(ctx.labels.parent),), -1)
    several = torch.zeros(len(first), dtype=torch.bool)
    for i, op in enumerate(ctx.ops):
        if not isinstance(RULES.get(op.node.target), HANDS_ON):
            for layer in (layer for fact in op.facts() if fact.source != "param" for layer in fact.layers):
                labels = compact(layer).unique()
                several[labels] |= (first[labels] >= 0) & (first[labels] != i)
                first[labels] = torch.where(first[labels] < 0, i, first[labels])
    for layer in (layer for fact in ctx.outputs for layer in fact.layers):
        several[compact(layer).unique()] = True  # whoever gets the output reads it too
    return first, several
