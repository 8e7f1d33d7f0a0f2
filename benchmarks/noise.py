"""Random numbers where an untrained model has zeros and ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def add_noise(model: nn.Module, generator: torch.Generator) -> None:
    """No parameter or statistic is a single number any more."""

    def normal(tensor: Tensor, size: float) -> None:
        tensor.copy_(size * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = name.rpartition(".")[2]
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        constant = bool((tensor == tensor.flatten()[0]).all())
        is_parameter = isinstance(tensor, nn.Parameter)
        if own == "running_mean":
            normal(tensor, 0.3)
        elif own == "running_var":
            uniform(tensor, 0.5, 2.0)
        elif own.endswith("bias") and tensor.dim() == 1 and is_parameter:
            normal(tensor, 0.2)
        elif constant and tensor.dim() <= 1 and is_parameter:
            rest = scale_at_rest(model, name)
            quiet = rest == 0.0 and not bool(tensor.any())  # a residual branch that begins at 0 is meant to be small
            uniform(tensor, *((0.1, 0.3) if quiet else (rest + 0.5, rest + 1.5)))
        elif constant and is_parameter:
            fan_in = max(tensor[0].numel(), 1)
            normal(tensor, fan_in**-0.5 if tensor.numel() > fan_in else 0.2)
        elif tensor.dim() >= 2 and is_parameter and own == "weight":
            gain = float(tensor.std()) * tensor[0].numel() ** 0.5
            tensor.mul_(1 / gain if gain < 0.5 else 1.0)  # else the output is little more than its bias


@torch.no_grad()
def calibrate(model: nn.Module, call: Call, generator: torch.Generator) -> None:
    """Statistics of batch norms near those of the data, so that the input is not lost on its way to the output.

    Three samples are too few: what they have in common deep inside, others have not. HaloNet's norms took the variance
    there for 0.1 where others had 25, block after block, and 1e-15 at its input came out as 1e-7.

    A channel that does not vary keeps the statistics it had alive, as when a network is pruned and not trained on.
    Those of a constant, variance 0, multiply its rounding by 1/sqrt(0 + eps), norm after norm: in Xception one bit of
    the weights came out as 2e-9. No network could be trained to that, for in float32 it would be its whole output.
    """

    def measure(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        if module.running_mean is not None and module.running_var is not None:
            rows = args[0].movedim(1, 0).flatten(1)
            varies = rows.var(1) > 1e-20 * rows.square().mean(1)
            factor = 0.7 + 0.6 * torch.rand(len(rows), generator=generator, dtype=rows.dtype)
            var = rows.var(1).clamp(min=1e-3) * factor
            shift = 0.3 * torch.randn(len(rows), generator=generator, dtype=rows.dtype)
            module.running_var[varies] = var[varies]
            module.running_mean[varies] = (rows.mean(1) + shift * var.sqrt())[varies]

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
    model(*call[0], **call[1])
    for hook in hooks:
        hook.remove()


def scale_at_rest(model: nn.Module, parameter: str) -> float:
    """The weight that makes a norm's scale 0: Gemma multiplies by 1 + weight."""
    kind = type(model.get_submodule(parameter.rpartition(".")[0])).__name__
    return -1.0 if kind.startswith("Gemma") and "Norm" in kind and not kind.startswith("Gemma4") else 0.0
