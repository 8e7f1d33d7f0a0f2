"""Whole random cases: a network with zeros in it, and calls of it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from . import layers as nets
from .attention import Cross
from .models import Block, Fused, Head, Language, TwoInputs, WithFeatures
from .plant import Planter
from .stacks import WIDTHS, YES_NO, Choose, conv_layers, flat_layers, grouped_attention, mlp, token_layers, token_norm


class Case:
    """A network with zeros in it, and what it is called with: a tensor, a tuple, or a list of calls."""

    def __init__(self, model: nn.Module, inputs: Any, story: str) -> None:
        self.model, self.inputs, self.story = model, inputs, story

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        calls = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return [call if isinstance(call, tuple) else (call,) for call in calls]

    def __repr__(self) -> str:
        return f"Case({self.story}\n{self.model})"


class Drawn:
    """A model before anything is planted, its inputs, and the width of its stream."""

    def __init__(self, model: nn.Module, inputs: Any, width: int) -> None:
        self.model, self.inputs, self.width = model, inputs, width


def case_from(choose: Choose, seed: int) -> Case:
    """The structure from `choose`, all numbers from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    family = choose(FAMILIES)
    drawn = family(choose, generator)
    story = Planter(drawn.model, generator, drawn.width).plant()
    model = drawn.model.double().eval()
    inputs = torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, drawn.inputs
    )
    return Case(model, inputs, f"{family.__name__}, seed {seed}, {story}")


def case_of(seed: int) -> Case:
    """Structure and numbers from one integer."""
    return case_from(random.Random(seed).choice, seed)


def flat(choose: Choose, generator: torch.Generator) -> Drawn:
    width = choose(WIDTHS)
    layers, end = flat_layers(choose, width, 4)
    model = maybe_with_features(choose, Head(nn.Sequential(*layers), "none", end, choose([1, 2, 3, 4])))
    return Drawn(model, torch.randn(3, width, generator=generator), width)


def images(choose: Choose, generator: torch.Generator) -> Drawn:
    width = choose(WIDTHS)
    layers, end = conv_layers(choose, width, 4)
    how = choose(["mean", "pool", "flatten"])
    head = Head(nn.Sequential(*layers), how, end * 25 if how == "flatten" else end, choose([1, 2, 3, 4]))
    x = torch.randn(2, width, 5, 5, generator=generator)
    if how != "flatten" and choose([True, False, False]):
        return Drawn(head, [x, torch.randn(1, width, 7, 7, generator=generator)], end)
    return Drawn(maybe_with_features(choose, head), x, end)


def tokens(choose: Choose, generator: torch.Generator) -> Drawn:
    width = 2 * choose([1, 2, 3, 4])
    stem = choose([None, None, nn.Linear, nets.Patches])
    layers, end = token_layers(choose, width, 4)
    x = torch.randn(2, 4, width, generator=generator)
    if stem is nn.Linear:
        layers.insert(0, nn.Linear(width, width))
    elif stem is nets.Patches:
        layers.insert(0, nets.Patches(3, width, 2))
        x = torch.randn(2, 3, 4, 4, generator=generator)
    head = Head(nn.Sequential(*layers), choose(["mean", "first", "none"]), end, choose([1, 2, 3, 4]))
    return Drawn(maybe_with_features(choose, head), x, width)


def language(choose: Choose, generator: torch.Generator) -> Drawn:
    width, vocabulary, length = 2 * choose([1, 2, 3, 4]), choose([5, 8, 11]), 4
    positions = choose([0, 0, length])
    where = choose(["pre", "pre", "post", "inside", "parallel"])
    blocks: list[nn.Module] = [
        Block(
            grouped_attention(choose, width, length if positions else 0),
            mlp(choose, width, choose(["gated", "mlp"])),
            [token_norm(choose, width), token_norm(choose, width)],
            where,
        )
        for _ in range(choose([1, 2]))
    ]
    tied = choose(["no", "weight", "function"])
    model = Language(vocabulary, width, blocks, token_norm(choose, width), tied=tied, positions=positions)
    ids = torch.randint(vocabulary, (2, length), generator=generator)
    calls = choose(["one", "mask", "both", "lengths"])
    mask = torch.rand(2, 1, length, length, generator=generator) < 0.6
    mask = mask | torch.eye(length, dtype=torch.bool)  # no row is masked throughout
    if calls == "mask":
        return Drawn(model, (ids, mask), width)
    if calls == "both":
        return Drawn(model, [(ids,), (ids, mask)], width)
    if calls == "lengths" and not positions:
        return Drawn(model, [ids, torch.randint(vocabulary, (1, 6), generator=generator)], width)
    return Drawn(model, ids, width)


def two_inputs(choose: Choose, generator: torch.Generator) -> Drawn:
    if choose(YES_NO):
        return _fused(choose, generator)
    width, memory = 2 * choose([1, 2, 3, 4]), choose(WIDTHS)
    ours, _ = token_layers(choose, width, 4)
    theirs, end = flat_tokens(choose, memory)
    heads = choose([h for h in (1, 2, 3, 4) if width % h == 0])
    cross = Cross(width, end, heads)
    after = nn.Sequential(token_norm(choose, width), mlp(choose, width, "mlp"), nn.Linear(width, choose([1, 2, 3])))
    inputs = torch.randn(2, 4, width, generator=generator), torch.randn(2, 3, memory, generator=generator)
    return Drawn(TwoInputs(nn.Sequential(*ours), nn.Sequential(*theirs), cross, after), inputs, width)


def flat_tokens(choose: Choose, width: int) -> tuple[list[nn.Module], int]:
    new = choose(WIDTHS)
    return [nn.Linear(width, new), choose([nn.ReLU, nn.GELU, nn.Identity])(), token_norm(choose, new)], new


def _fused(choose: Choose, generator: torch.Generator) -> Drawn:
    channels, vector = choose(WIDTHS), choose(WIDTHS)
    image, width = conv_layers(choose, channels, 2)
    steer, end = flat_layers(choose, vector, 2)
    how = choose(["add", "gate", "cat"])
    steer.append(nn.Linear(end, width))
    rest, _ = conv_layers(choose, 2 * width if how == "cat" else width, 2)
    inputs = torch.randn(2, channels, 5, 5, generator=generator), torch.randn(2, vector, generator=generator)
    return Drawn(Fused(nn.Sequential(*image), nn.Sequential(*steer), nn.Sequential(*rest), how), inputs, width)


def maybe_with_features(choose: Choose, head: Head) -> nn.Module:
    return WithFeatures(head, choose(range(len(head.body) + 1))) if choose([False] * 5 + [True]) else head


FAMILIES = (flat, images, images, tokens, tokens, language, language, two_inputs)
