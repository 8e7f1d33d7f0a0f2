"""Stacks of random layers. `choose` takes one of several: `random.Random(seed).choice`, or a draw of Hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from . import layers as nets
from .attention import Attention, GroupedAttention, Multihead
from .layers import ACTIVATIONS

Choose = Callable[[Sequence[Any]], Any]

WIDTHS = range(2, 10)
YES_NO = (False, True)
SPLITS = ("chunk", "slice", "apart", "glu")
FLAT = "linear linear bn ln rms act residual gated branches dense streams twice dropout".split()
CONV = (
    "conv conv depthwise grouped point bn ln gn in act prelu residual branches dense streams se gate pool shuffle half "
    "pad transposed down pixels up twice"
).split()


def divisors(width: int) -> list[int]:
    return [d for d in range(1, width + 1) if width % d == 0]


def token_norm(choose: Choose, width: int) -> nn.Module:
    kind = choose(["layer", "layer", "rms", "llama", "gemma", "bare", "none"])
    if kind == "layer":
        return nn.LayerNorm(width, elementwise_affine=choose([True, True, False]))
    if kind == "rms":
        return nn.RMSNorm(width, elementwise_affine=choose([True, True, False]))
    return nets.HandRMSNorm(width, kind) if kind != "none" else nn.Identity()


def scale(choose: Choose, width: int) -> int:
    return choose([0, width])


def flat_layers(choose: Choose, width: int, depth: int) -> tuple[list[nn.Module], int]:
    """Layers on vectors, and the width that they end with."""
    layers: list[nn.Module] = []
    for _ in range(choose(range(1, depth + 1))):
        kind = choose(FLAT)
        if kind == "linear":
            new = choose(WIDTHS)
            layers.append(nn.Linear(width, new, bias=choose(YES_NO)))
            width = new
        elif kind == "bn":
            layers.append(nn.BatchNorm1d(width, affine=choose([True, True, False])))
        elif kind == "ln":
            layers.append(nn.LayerNorm(width, elementwise_affine=choose(YES_NO)))
        elif kind == "rms":
            layers.append(token_norm(choose, width))
        elif kind == "act":
            layers.append(choose(ACTIVATIONS)())
        elif kind == "dropout":
            layers.append(nn.Dropout(0.3))
        elif kind == "gated":
            layers.append(nets.Gated(width, choose(WIDTHS), choose(SPLITS), choose(ACTIVATIONS)))
        elif kind == "twice":
            layers.append(nets.Twice(nn.Linear(width, width, bias=choose(YES_NO)), choose(ACTIVATIONS)()))
        elif depth > 1:
            layer, width = _joined(choose, kind, width, depth, flat_layers, nn.Linear, -1)
            layers.append(layer)
    return layers, width


def conv_layers(choose: Choose, width: int, depth: int) -> tuple[list[nn.Module], int]:
    """Layers on images. Each keeps the resolution, if that is odd, so that branches can meet."""
    layers: list[nn.Module] = []
    for _ in range(choose(range(1, depth + 1))):
        kind, bias = choose(CONV), choose(YES_NO)
        if kind in ("residual", "branches", "dense", "streams"):
            if depth > 1:
                layer, width = _joined(choose, kind, width, depth, conv_layers, _point, 1)
                layers.append(layer)
        elif kind == "half":
            if depth > 1 and width % 2 == 0:
                body, end = conv_layers(choose, width // 2, depth - 1)
                width = width // 2 + end
                layers += [
                    nets.HalfThrough(nn.Sequential(*body)),
                    nets.Shuffle(choose([d for d in (1, 2) if width % d == 0])),
                ]
        elif kind in ("conv", "point", "depthwise", "grouped", "pad", "transposed", "down", "pixels", "twice"):
            more, width = _convolved(choose, kind, width, bias)
            layers += more
        else:
            layers += _on_images(choose, kind, width)
    return layers, width


def _point(width: int, new: int) -> nn.Module:
    return nn.Conv2d(width, new, 1)


def _joined(
    choose: Choose, kind: str, width: int, depth: int, stack: Any, last: Callable[[int, int], nn.Module], dim: int
) -> tuple[nn.Module, int]:
    """Streams that part and meet again."""

    def back_to(target: int) -> nn.Module:
        body, end = stack(choose, width, depth - 1)
        return nn.Sequential(*body, last(end, target))

    if kind == "residual":
        return nets.Residual(back_to(width), scale(choose, width)), width
    if kind == "streams":
        meet = choose(["add", "mul", "cat"])
        return nets.Streams(back_to(width), back_to(width), meet, dim), 2 * width if meet == "cat" else width
    if kind == "dense":
        growth = choose(range(1, 4))
        counts = [width + growth * i for i in range(choose([1, 2, 3]))]
        between = choose(ACTIVATIONS)
        grown = [nn.Sequential(between(), last(count, growth)) for count in counts]
        return nets.Dense(grown, dim), width + growth * len(counts)
    one, a = stack(choose, width, depth - 1)
    two, b = stack(choose, width, depth - 1)
    return nets.Branches(nn.Sequential(*one), nn.Sequential(*two), dim), a + b


def _convolved(choose: Choose, kind: str, width: int, bias: bool) -> tuple[list[nn.Module], int]:
    new = choose(WIDTHS)
    if kind == "point":
        return [nn.Conv2d(width, new, 1, bias=bias)], new
    if kind == "conv":
        mode = choose(["zeros", "zeros", "reflect", "circular"])
        return [nn.Conv2d(width, new, 3, padding=1, bias=bias, padding_mode=mode)], new
    if kind == "depthwise":
        new = width * choose([1, 1, 2, 3])
        return [nn.Conv2d(width, new, 3, padding=1, groups=width, bias=bias)], new
    if kind == "grouped":
        groups = choose(divisors(width))
        new, kernel = groups * choose(range(1, 4)), choose([1, 3])
        layers = [nn.Conv2d(width, new, kernel, padding=kernel // 2, groups=groups, bias=bias)]
        return layers + ([nets.Shuffle(groups)] if choose(YES_NO) else []), new
    if kind == "pad":
        return [nets.PadConv(width, new, choose(["constant", "reflect"]), choose([0.0, 0.0, 0.5]), bias)], new
    if kind == "transposed":
        groups = choose([1, *divisors(width)])
        new = groups * choose(range(1, 4))
        kernel = choose([1, 3])
        return [nn.ConvTranspose2d(width, new, kernel, 1, kernel // 2, groups=groups, bias=bias)], new
    if kind == "down":  # by two, and up again
        middle = choose(WIDTHS)
        return [
            nn.Conv2d(width, middle, 3, 2, 1, bias=bias),
            nn.ConvTranspose2d(middle, new, 3, 2, 1, bias=choose(YES_NO)),
        ], new
    if kind == "pixels":
        if choose(YES_NO):
            return [nn.Conv2d(width, 4 * new, 1, bias=bias), nn.PixelShuffle(2), nn.AvgPool2d(2)], new
        return [nn.Conv2d(width, 4 * new, 3, padding=1, bias=bias), nn.PixelShuffle(2), nn.Conv2d(new, new, 2, 2)], new
    return [nets.Twice(nn.Conv2d(width, width, 3, padding=1, bias=bias), choose(ACTIVATIONS)())], width


def _on_images(choose: Choose, kind: str, width: int) -> list[nn.Module]:
    """Layers that keep the width."""
    if kind == "bn":
        return [nn.BatchNorm2d(width, affine=choose([True, True, False]))]
    if kind == "ln":
        return [nets.LayerNorm2d(width)]
    if kind == "gn":
        return [nn.GroupNorm(choose(divisors(width)), width, affine=choose([True, True, False]))]
    if kind == "in":
        return [nn.InstanceNorm2d(width, affine=choose(YES_NO), track_running_stats=choose([False, False, True]))]
    if kind == "act":
        return [choose(ACTIVATIONS)()]
    if kind == "prelu":
        return [nn.PReLU(choose([1, width]))]
    if kind == "se":
        return [nets.SqueezeExcite(width, choose(WIDTHS))]
    if kind == "gate":
        return [nets.SpatialGate(width)]
    if kind == "up":
        return [nets.Upsampled(choose(["nearest", "bilinear"]))]
    if kind == "shuffle":
        return [nets.Shuffle(choose(divisors(width)))]
    pools = [nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.MaxPool2d(3, 1, 1)]
    return [choose(pools)]


def token_layers(choose: Choose, width: int, tokens: int) -> tuple[list[nn.Module], int]:
    """Layers on tokens of an even width."""
    layers: list[nn.Module] = []
    if choose(YES_NO):
        layers.append(nets.Tokens(width, tokens))
        tokens += 1
    for _ in range(choose([1, 2, 3])):
        body = nn.Sequential(token_norm(choose, width), mixer(choose, width, tokens))
        layers.append(nets.Residual(body, scale(choose, width)) if choose(YES_NO) else body)
    return layers, width


def mixer(choose: Choose, width: int, tokens: int) -> nn.Module:
    kind = choose(["attention", "grouped", "grouped", "multihead", "mlp", "mix", "gated"])
    if kind == "attention":
        style = choose(["packed", "separate", "matmul", "causal"])
        return Attention(width, choose([1, 2, 3]), choose([1, 2, 3, 4]), style)
    if kind == "grouped":
        return grouped_attention(choose, width, tokens)
    if kind == "multihead":
        return Multihead(width, choose([h for h in (1, 2, 3, 4) if width % h == 0]))
    if kind == "mix":
        return nets.TokenMix(tokens, choose(WIDTHS))
    return mlp(choose, width, kind)


def mlp(choose: Choose, width: int, kind: str) -> nn.Module:
    hidden, activation = choose(WIDTHS), choose(ACTIVATIONS)
    if kind == "gated":
        return nets.Gated(width, hidden, choose(SPLITS), activation)
    return nn.Sequential(nn.Linear(width, hidden), activation(), nn.Linear(hidden, width))


def grouped_attention(choose: Choose, width: int, tokens: int) -> GroupedAttention:
    """With `tokens` 0 it takes any number of them."""
    rotary = choose(["", "halves", "pairs"])
    return GroupedAttention(
        width,
        heads=choose([1, 2, 3]),
        shared_by=choose([1, 2, 3]),
        head_dim=choose([2, 4]) if rotary else choose([1, 2, 3, 4]),
        share=choose(["expand", "repeat", "gqa"]),
        rotary=rotary,
        norm=choose(["", "", "head", "all"]),
        scores=choose(["sdpa", "causal", "written", "softcap"] + ["bias"] * (tokens > 0)),
        bias=choose(YES_NO),
        tokens=tokens,
    )
