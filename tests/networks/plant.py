"""Zeros in a random network: of every kind and anywhere, and planted where a whole channel, head or block can go."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Planter:
    """Random numbers and zeros for one model, all from one generator."""

    def __init__(self, model: nn.Module, generator: torch.Generator, width: int) -> None:
        self.model, self.generator, self.width = model, generator, width  # `width`: that of its residual stream

    @torch.no_grad()
    def plant(self) -> str:
        """Numbers everywhere, then zeros; the answer says in words which."""
        density = float(self.rand())
        for name, parameter in self.model.named_parameters():
            parameter.normal_(0, 0.7, generator=self.generator)
            if parameter.dim() == 1:
                self.thin_vector(name, parameter)
            else:
                self.thin_matrix(parameter, density)
        self.fill_buffers()
        planted = [name for name, p in (("stream", 0.5), ("readers", 0.2), ("heads", 0.5)) if self.chance(p)]
        for name in planted:
            getattr(self, f"dead_{name}")()
        return f"density {density:.2f}, planted {planted}"

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def chance(self, p: float) -> bool:
        return float(self.rand()) < p

    def thin_vector(self, name: str, parameter: Tensor) -> None:
        if self.chance(0.3):
            parameter.mul_(self.rand(*parameter.shape) < 0.5)
        if "bias" in name and self.chance(0.3):
            parameter.zero_()

    def thin_matrix(self, parameter: Tensor, density: float) -> None:
        """Rows, columns, single entries, everything."""
        flat = parameter if parameter.dim() == 2 else parameter.flatten(2) if parameter.dim() > 3 else parameter
        if self.chance(0.8):
            flat[self.rand(flat.size(0)) < density * 0.8] = 0
        if self.chance(0.8):
            flat[:, self.rand(flat.size(1)) < density * 0.8] = 0
        if self.chance(0.3):
            parameter.mul_(self.rand(*parameter.shape) < 0.4)
        if self.chance(0.06):
            parameter.zero_()

    def fill_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(generator=self.generator)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0, generator=self.generator)

    def dead_stream(self) -> None:
        """The same channels dead in every layer that may write the stream; their biases zero, or not."""
        gone, bare = self.rand(self.width) < 0.5, self.chance(0.6)
        for name, parameter in self.model.named_parameters():
            last = name.rpartition(".")[2]
            if last in ("cls", "pos") or "embed" in name:
                if parameter.size(-1) == self.width:
                    parameter[..., gone] = 0
            elif parameter.size(0) == self.width and (last != "bias" or bare):
                parameter[gone] = 0

    def dead_readers(self) -> None:
        """The same channels unread in every layer that may read the stream."""
        gone = self.rand(self.width) < 0.5
        for parameter in self.model.parameters():
            if parameter.dim() > 1 and parameter.size(1) == self.width:
                parameter[:, gone] = 0

    def dead_heads(self) -> None:
        """Heads that the output projection does not read, and heads without values."""
        for module in self.model.modules():
            if hasattr(module, "proj") and hasattr(module, "num_heads"):
                columns = module.proj.weight.view(len(module.proj.weight), module.num_heads, -1)
                columns[:, self.rand(module.num_heads) < 0.4] = 0
                if hasattr(module, "v"):
                    rows = module.v.weight.view(-1, module.head_dim, module.v.in_features)
                    rows[self.rand(len(rows)) < 0.3] = 0
            elif isinstance(module, nn.MultiheadAttention):
                columns = module.out_proj.weight.view(module.embed_dim, module.num_heads, -1)
                columns[:, self.rand(module.num_heads) < 0.4] = 0
