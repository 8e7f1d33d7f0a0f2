"""Would a layer without a bias use one if it had it?"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..modules import can_index

_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def can_take_bias(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a Linear or Conv without a bias would add one: by its class, or as it does on zero weights."""
    own = getattr(module, "weight", None)
    if not isinstance(module, _PLAIN) or not isinstance(own, Tensor) or own.shape != shape:
        return False
    return type(module).forward in [p.forward for p in _PLAIN] or can_index(module) or _adds_its_bias(module)


@torch.no_grad()
def _adds_its_bias(module: nn.Module) -> bool:
    """A subclass with a forward of its own (timm's Linear, `same` padding): zero weights give 0, and then the bias."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._forward_hooks = type(module._forward_hooks)()
    twin._forward_pre_hooks = type(module._forward_pre_hooks)()
    weight, width = torch.zeros_like(module._parameters["weight"]), _outputs(module)  # type: ignore[arg-type]
    twin._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    x = weight.new_ones(2, *_input_shape(module))
    bias = torch.linspace(-2, 3, width, dtype=weight.dtype, device=weight.device)
    try:
        without = twin(x)
        twin._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
        with_bias = twin(x)
    except Exception:
        return False
    want = bias if isinstance(module, nn.Linear) else bias.reshape(-1, *[1] * (x.dim() - 2))
    return bool((without == 0).all()) and torch.equal(with_bias, want.expand_as(with_bias))


def _outputs(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _input_shape(module: nn.Module) -> tuple[int, ...]:
    """Just large enough for the taps."""
    if isinstance(module, nn.Linear):
        return (module.in_features,)
    assert isinstance(module, nn.modules.conv._ConvNd)
    reach = (d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True))
    return (module.in_channels, *reach)
