"""Random networks from all supported ops, with random masks, for Hypothesis to draw."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

ACTIVATIONS = [nn.ReLU, nn.GELU, nn.SiLU, nn.SELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.Softplus]


class Residual(nn.Module):
    def __init__(self, body: nn.Module, scale: int = 0) -> None:
        super().__init__()
        self.body = body
        self.gamma = nn.Parameter(torch.ones(scale)) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.gamma is not None:
            y = y * (self.gamma if x.dim() != 4 else self.gamma.reshape(1, -1, 1, 1))
        return x + y


class Branches(nn.Module):
    """Concat of two branches along the channels."""

    def __init__(self, one: nn.Module, two: nn.Module, dim: int) -> None:
        super().__init__()
        self.one, self.two, self.dim = one, two, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], self.dim)


class Gated(nn.Module):
    """act(a) * b from one projection, cut in two."""

    def __init__(self, width: int, hidden: int, split: str) -> None:
        super().__init__()
        self.up, self.down, self.split = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width), split

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        a, b = h.chunk(2, -1) if self.split == "chunk" else (h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :])
        return self.down(F.silu(a) * b)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class Attention(nn.Module):
    """Self-attention in the ways people write it."""

    def __init__(self, width: int, heads: int, head_dim: int, style: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.inner, self.style = heads, head_dim, heads * head_dim, style
        self.scale = head_dim**-0.5
        if style == "packed":
            self.qkv = nn.Linear(width, 3 * self.inner)
        else:
            self.q, self.k, self.v = (nn.Linear(width, self.inner) for _ in range(3))
        self.proj = nn.Linear(self.inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.style == "packed":
            q, k, v = (
                self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            )
        else:
            q, k, v = (
                part(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
                for part in (self.q, self.k, self.v)
            )
        if self.style == "matmul":
            y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        elif self.style == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, -1))


class Multihead(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Tokens(nn.Module):
    """Class token and position embedding."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, tokens + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos


class TokenMix(nn.Module):
    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)


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


class Case:
    """A network with zeros in it, and an input."""

    def __init__(self, model: nn.Module, inputs: Tensor, story: str) -> None:
        self.model, self.inputs, self.story = model, inputs, story

    def __repr__(self) -> str:
        return f"Case({self.story}\n{self.model})"


widths = st.integers(2, 9)


@st.composite
def flat_layers(draw: Any, width: int, depth: int) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, depth))):
        kind = draw(
            st.sampled_from(["linear", "linear", "bn", "ln", "act", "residual", "gated", "branches", "dropout"])
        )
        if kind == "linear":
            new = draw(widths)
            layers.append(nn.Linear(width, new, bias=draw(st.booleans())))
            width = new
        elif kind == "bn":
            layers.append(nn.BatchNorm1d(width))
        elif kind == "ln":
            layers.append(nn.LayerNorm(width, elementwise_affine=draw(st.booleans())))
        elif kind == "act":
            layers.append(draw(st.sampled_from(ACTIVATIONS))())
        elif kind == "dropout":
            layers.append(nn.Dropout(0.3))
        elif kind == "residual" and depth > 1:
            body, end = draw(flat_layers(width, depth - 1))
            layers.append(Residual(nn.Sequential(*body, nn.Linear(end, width)), draw(st.sampled_from([0, width]))))
        elif kind == "gated":
            layers.append(Gated(width, draw(widths), draw(st.sampled_from(["chunk", "slice"]))))
        elif kind == "branches" and depth > 1:
            one, a = draw(flat_layers(width, depth - 1))
            two, b = draw(flat_layers(width, depth - 1))
            layers.append(Branches(nn.Sequential(*one), nn.Sequential(*two), -1))
            width = a + b
    return layers, width


@st.composite
def conv_layers(draw: Any, width: int, depth: int) -> tuple[list[nn.Module], int]:
    """Every layer keeps the resolution, so that branches can meet."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, depth))):
        kind = draw(
            st.sampled_from(
                [
                    "conv",
                    "conv",
                    "depthwise",
                    "grouped",
                    "point",
                    "bn",
                    "ln",
                    "gn",
                    "act",
                    "prelu",
                    "residual",
                    "branches",
                    "se",
                    "pool",
                ]
            )
        )
        bias = draw(st.booleans())
        if kind in ("conv", "point"):
            new, kernel = draw(widths), 1 if kind == "point" else 3
            mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular"])) if kernel > 1 else "zeros"
            layers.append(nn.Conv2d(width, new, kernel, padding=kernel // 2, bias=bias, padding_mode=mode))
            width = new
        elif kind == "depthwise":
            layers.append(
                nn.Conv2d(width, width * draw(st.sampled_from([1, 1, 2])), 3, padding=1, groups=width, bias=bias)
            )
            width = layers[-1].out_channels
        elif kind == "grouped" and width % 2 == 0:
            new = 2 * draw(st.integers(1, 4))
            layers.append(nn.Conv2d(width, new, 3, padding=1, groups=2, bias=bias))
            width = new
        elif kind in ("bn", "ln"):
            layers.append(nn.BatchNorm2d(width) if kind == "bn" else LayerNorm2d(width))
        elif kind == "gn" and width % 2 == 0:
            layers.append(nn.GroupNorm(2, width))
        elif kind == "act":
            layers.append(draw(st.sampled_from(ACTIVATIONS))())
        elif kind == "prelu":
            layers.append(nn.PReLU(draw(st.sampled_from([1, width]))))
        elif kind == "pool":
            layers.append(
                draw(
                    st.sampled_from(
                        [nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.MaxPool2d(3, 1, 1)]
                    )
                )
            )
        elif kind == "se":
            layers.append(SqueezeExcite(width, draw(widths)))
        elif kind == "residual" and depth > 1:
            body, end = draw(conv_layers(width, depth - 1))
            layers.append(Residual(nn.Sequential(*body, nn.Conv2d(end, width, 1)), draw(st.sampled_from([0, width]))))
        elif kind == "branches" and depth > 1:
            one, a = draw(conv_layers(width, depth - 1))
            two, b = draw(conv_layers(width, depth - 1))
            layers.append(Branches(nn.Sequential(*one), nn.Sequential(*two), 1))
            width = a + b
    return layers, width


@st.composite
def token_layers(draw: Any, width: int, tokens: int) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    if draw(st.booleans()):
        layers.append(Tokens(width, tokens))
        tokens += 1
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["attention", "attention", "multihead", "mlp", "mix", "gated"]))
        norm = nn.LayerNorm(width) if draw(st.booleans()) else nn.Identity()
        body: nn.Module
        if kind == "attention":
            style = draw(st.sampled_from(["packed", "separate", "matmul", "causal"]))
            body = Attention(width, draw(st.integers(1, 3)), draw(st.integers(1, 4)), style)
        elif kind == "multihead":
            body = Multihead(width, draw(st.sampled_from([h for h in (1, 2, 3, 4) if width % h == 0])))
        elif kind == "mlp":
            hidden = draw(widths)
            body = nn.Sequential(
                nn.Linear(width, hidden), draw(st.sampled_from(ACTIVATIONS))(), nn.Linear(hidden, width)
            )
        elif kind == "gated":
            body = Gated(width, draw(widths), draw(st.sampled_from(["chunk", "slice"])))
        else:
            body = TokenMix(tokens, draw(widths))
        body = nn.Sequential(norm, body)
        layers.append(Residual(body, draw(st.sampled_from([0, width]))) if draw(st.booleans()) else body)
    return layers, width


@st.composite
def cases(draw: Any) -> Case:
    kind = draw(st.sampled_from(["flat", "conv", "tokens"]))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    width, outputs = draw(widths), draw(st.integers(1, 4))
    if kind == "flat":
        layers, end = draw(flat_layers(width, 4))
        model: nn.Module = Head(nn.Sequential(*layers), "none", end, outputs)
        x = torch.randn(3, width, generator=generator)
    elif kind == "conv":
        layers, end = draw(conv_layers(width, 4))
        how = draw(st.sampled_from(["mean", "pool", "flatten"]))
        model = Head(nn.Sequential(*layers), how, end * 25 if how == "flatten" else end, outputs)
        x = torch.randn(2, width, 5, 5, generator=generator)
    else:
        width = 2 * draw(st.integers(1, 4))
        layers, end = draw(token_layers(width, 4))
        model = Head(nn.Sequential(*layers), draw(st.sampled_from(["mean", "first", "none"])), end, outputs)
        x = torch.randn(2, 4, width, generator=generator)
    story = plant(model, generator)
    return Case(model.double().eval(), x.double(), f"{kind}, seed {seed}, {story}")


def plant(model: nn.Module, generator: torch.Generator) -> str:
    """Zeros of every kind, anywhere; numbers of every kind elsewhere."""

    def chance(p: float) -> bool:
        return float(torch.rand((), generator=generator)) < p

    density = float(torch.rand((), generator=generator))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.7, generator=generator)
            if parameter.dim() == 1:
                if chance(0.3):
                    parameter.mul_(torch.rand(parameter.shape, generator=generator) < 0.5)
                if "bias" in name and chance(0.3):
                    parameter.zero_()
                continue
            flat = parameter if parameter.dim() == 2 else parameter.flatten(2) if parameter.dim() > 3 else parameter
            if chance(0.8):
                flat[torch.rand(flat.size(0), generator=generator) < density * 0.8] = 0
            if chance(0.8):
                flat[:, torch.rand(flat.size(1), generator=generator) < density * 0.8] = 0
            if chance(0.3):
                parameter.mul_(torch.rand(parameter.shape, generator=generator) < 0.4)
            if chance(0.06):
                parameter.zero_()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(generator=generator)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0, generator=generator)
    return f"density {density:.2f}"
