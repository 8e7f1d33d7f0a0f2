"""Whole blocks to kill: residual branches whose last layer becomes 0; and what the code of a block ties together."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterable

import torch
from leaves import Leaf
from torch import nn

_LAST = re.compile(
    r"(^|\.)(proj|fc2|conv_pwl|out_proj|o_proj|down_proj|c_proj|lin2|out_lin|pwconv2|wo|o|output\.dense|w2|w3|conv3)$"
)
_TRIES = 3
# Code that lays out what goes out of a block at the width of what came in.
_KEEPS_WIDTH = re.compile(r"\bC = x\.shape.*(reshape|view)\(B, C, \w+\)", re.DOTALL)


def choose_blocks(model: nn.Module, leaves: dict[str, Leaf], generator: torch.Generator) -> list[dict[str, list[str]]]:
    """Of every stack of at least three alike, some in random order: their names, and the last layers of their branches.

    The first of each is to be killed, and where that takes others with it, the next.
    """
    stacks = []
    for prefix, group in model.named_modules():
        children = [(f"{prefix}.{n}" if prefix else n, c) for n, c in group.named_children()]
        if not isinstance(group, nn.ModuleList | nn.Sequential) or len(children) < 3:
            continue
        kinds = Counter(type(c) for _, c in children[1:] if not type(c).__module__.startswith("torch.nn."))
        common = max(kinds, key=kinds.__getitem__, default=None)
        alike = [n for n, c in children[1:] if type(c) is common and not _is_stack(c)]
        order = torch.randperm(len(alike), generator=generator)[:_TRIES].tolist()
        chosen = {alike[i]: _last_layers(alike[i], leaves) for i in order}
        if any(chosen.values()):
            stacks.append({block: last for block, last in chosen.items() if last})
    return stacks


def _last_layers(block: str, leaves: dict[str, Leaf]) -> list[str]:
    inside = [n for n in leaves if n.startswith(f"{block}.") and leaves[n].kind == "affine"]
    return [n for n in inside if _LAST.search(n)] or inside[-1:]


def blame(blocks: Iterable[str], killed: list[str]) -> set[str]:
    """A block that is not a residual branch takes others with it: of the leaves that died, those outside name it."""
    outside = [leaf for leaf in killed if not leaf.startswith(tuple(f"{block}." for block in blocks))]
    return {max(blocks, key=lambda block: _shared(block, leaf)) for leaf in outside} if blocks else set()


def _shared(one: str, other: str) -> int:
    """How many parts of two dotted names are the same, from the left."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_stack(module: nn.Module) -> bool:
    """Made of blocks itself: a stage."""
    lists = [list(m) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    return any(sum(_layers(child) > 1 for child in children) > 1 for children in lists)


def _layers(module: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear | nn.modules.conv._ConvNd) for m in module.modules())


def read_in_pieces(leaves: dict[str, Leaf]) -> dict[int, int]:
    """Width of a layer -> that of the pieces in which grouped convolutions of its block read it (Res2NeXt).

    Every group loses equally many channels or nothing goes, so each piece must die where these convolutions do.
    """
    pieces: dict[int, int] = {}
    in_front: dict[str, int] = {}
    for name, leaf in leaves.items():
        block = re.sub(r"(\.\d+)+$", "", name).rpartition(".")[0]
        if leaf.kind == "affine" and leaf.groups == 1:
            in_front[block] = leaf.outputs
        elif leaf.kind == "affine" and leaf.inputs < (whole := in_front.get(block, 0)) and whole % leaf.inputs == 0:
            pieces[whole] = leaf.inputs
    return pieces


def keep_width(model: nn.Module) -> list[str]:
    """Blocks that hand on as many channels as they get, because their code says so (TinyViT)."""
    theirs = [(n, type(m).forward) for n, m in model.named_modules() if not type(m).__module__.startswith("torch.nn.")]
    return [name for name, forward in theirs if _KEEPS_WIDTH.search(inspect.getsource(forward))]
