"""The modules of a model that mix or normalise channels, and the geometry of their weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_LAYER_NORM = re.compile(r"(Layer|RMS|Rms|Simple)Norm")
_NOT_A_NORM = re.compile(r"Response|Evo|Frn|L2")


@dataclass(frozen=True)
class Leaf:
    """A module that mixes or normalises channels. kind: affine, channelwise, norm, table, attention, recurrent."""

    name: str
    kind: str
    module: nn.Module

    @property
    def transposed(self) -> bool:
        return type(self.module).__name__ == "Conv1D" or bool(getattr(self.module, "transposed", False))

    @property
    def rows(self) -> int:
        """The dimension of the weight that holds the outputs."""
        return 1 if self.transposed or self.kind == "table" else 0

    @property
    def outputs(self) -> int:
        return 0 if self.kind == "recurrent" else self.weight.size(self.rows)

    @property
    def weight(self) -> Tensor:
        owner = self.module.out_proj if isinstance(self.module, nn.MultiheadAttention) else self.module
        return owner.weight  # type: ignore[return-value]

    @property
    def groups(self) -> int:
        return int(getattr(self.module, "groups", 1)) if isinstance(self.module, nn.modules.conv._ConvNd) else 1

    def axis(self, x: Tensor) -> int:
        if isinstance(self.module, nn.modules.conv._ConvNd):
            return x.dim() - 1 - len(self.module.kernel_size)
        if (
            isinstance(self.module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm)
            or "2d" in type(self.module).__name__
        ):
            return min(1, x.dim() - 1)
        return x.dim() - 1

    @property
    def is_norm(self) -> bool:
        return self.kind == "norm" or isinstance(self.module, nn.modules.batchnorm._BatchNorm)

    @property
    def inputs(self) -> int:
        return self.weight.size(1 - self.rows) * self.groups if self.kind == "affine" else self.outputs

    def unread(self) -> Tensor:
        """Inputs that no output reads: columns of zeros. Whether a norm's output is read is for others to say."""
        if self.kind not in ("affine", "attention", "recurrent"):
            return torch.ones(self.outputs // self._multiplier, dtype=torch.bool)
        if self.kind != "affine":
            return torch.tensor(False)
        weight = self.weight.detach()
        if self.groups > 1:
            grouped = weight.flatten(2).abs().sum(2).view(self.groups, -1, weight.size(1))
            return (grouped.sum(1) == 0).flatten()
        return weight.transpose(0, 1 - self.rows).flatten(1).abs().sum(1) == 0

    @property
    def _multiplier(self) -> int:
        """Outputs of a depthwise convolution that read one input."""
        return self.outputs // self.groups if self.kind == "channelwise" and self.groups > 1 else 1

    def columns(self, inputs: Tensor) -> Tensor:
        """The entries of the weight that read these inputs."""
        weight = self.weight
        mask = torch.zeros(weight.shape, dtype=torch.bool)
        if self.groups > 1:
            per_group = inputs.view(self.groups, 1, -1).expand(-1, weight.size(0) // self.groups, -1).flatten(0, 1)
            return mask | per_group.view(*per_group.shape, *[1] * (weight.dim() - 2))
        mask.transpose(0, 1 - self.rows)[inputs] = True
        return mask


def leaves(model: nn.Module) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind and not any(name.startswith(f"{outer}.") for outer in inside):
            found[name] = Leaf(name, kind, module)
            if kind in ("attention", "recurrent"):
                inside.append(name)
    return found


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, nn.LSTM | nn.GRU):
        return "recurrent"
    if isinstance(module, nn.Embedding):
        return "table"
    if isinstance(module, nn.modules.conv._ConvNd):
        channelwise = module.groups == module.in_channels and not module.transposed and module.groups > 1
        return "channelwise" if channelwise else "" if module.transposed and module.groups > 1 else "affine"
    if isinstance(module, nn.Linear) or name == "Conv1D":
        return "affine"
    if not isinstance(weight, Tensor) or weight.dim() != 1 or _NOT_A_NORM.search(name):
        return ""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "channelwise"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) or _LAYER_NORM.search(name):
        return "norm"
    return ""
