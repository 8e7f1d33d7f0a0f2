"""Modules that the random networks are made of: what people write around Linear, conv and norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class Dense(nn.Module):
    """DenseNet: every layer reads all that came before it."""

    def __init__(self, layers: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.layers, self.dim = nn.ModuleList(layers), dim

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], self.dim)
        return x


class Streams(nn.Module):
    """Two residual streams that read each other, and meet at the end."""

    def __init__(self, ours: nn.Module, theirs: nn.Module, meet: str, dim: int) -> None:
        super().__init__()
        self.ours, self.theirs, self.meet, self.dim = ours, theirs, meet, dim

    def forward(self, x: Tensor) -> Tensor:
        one, two = x, x.tanh()
        one = one + self.ours(two)
        two = two + self.theirs(one)
        if self.meet == "cat":
            return torch.cat([one, two], self.dim)
        return one * two if self.meet == "mul" else one - two


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self, layer: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.between(self.layer(x)))


class Gated(nn.Module):
    """act(a) * b, from one projection cut in two, or from two."""

    def __init__(self, width: int, hidden: int, split: str, activation: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.split, self.activation, self.down = split, activation(), nn.Linear(hidden, width)
        if split == "apart":
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden)
        else:
            self.up = nn.Linear(width, 2 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.split == "apart":
            return self.down(self.activation(self.gate(x)) * self.up(x))
        h = self.up(x)
        if self.split == "glu":
            return self.down(F.glu(h, -1))
        a, b = h.chunk(2, -1) if self.split == "chunk" else (h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :])
        return self.down(self.activation(a) * b)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class SpatialGate(nn.Module):
    """One number for each position, times all channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.score(x))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class HandRMSNorm(nn.Module):
    """RMSNorm as in Llama, with 1 + w as in Gemma, or without a weight."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.style, self.eps = style, 1e-6
        if style != "bare":
            self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.style == "bare":
            return y
        return y * (1 + self.weight) if self.style == "gemma" else self.weight * y


class Shuffle(nn.Module):
    """The channels of all groups, dealt out in turn."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2).reshape(x.shape)


class HalfThrough(nn.Module):
    """ShuffleNet: half of the channels pass by, the other half go through a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, 1)
        return torch.cat([one, self.body(two)], 1)


class PadConv(nn.Module):
    """The padding is an op of its own."""

    def __init__(self, width: int, out: int, mode: str, value: float, bias: bool) -> None:
        super().__init__()
        self.mode, self.value, self.conv = mode, value, nn.Conv2d(width, out, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value if self.mode == "constant" else None
        return self.conv(F.pad(x, (0, 2, 1, 1), self.mode, value))


class Upsampled(nn.Module):
    """Up and down again: the resolution stays."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.interpolate(x, scale_factor=2.0, mode=self.mode), 2)


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


class Patches(nn.Module):
    """An image as tokens."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)
