"""Linear and convolutions that gather their inputs first, so that the writer may stay wider than the reader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .state import state_of


class _Indexed(nn.Module):
    """Gathers its input channels by `index`, then is the layer it inherits from."""

    index: Tensor
    _channels_at = -1  # from the end, so that unbatched inputs work

    def __init__(self, *args: Any, index: Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_index(self, index)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(self._channels_at, self.index))  # type: ignore[no-any-return]


class IndexedLinear(_Indexed, nn.Linear):
    """nn.Linear of `x[..., index]`; takes nn.Linear's arguments and `index`, an in_features long int64 tensor."""


class IndexedConv1d(_Indexed, nn.Conv1d):
    """nn.Conv1d of `x[:, index]`; takes nn.Conv1d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -2


class IndexedConv2d(_Indexed, nn.Conv2d):
    """nn.Conv2d of `x[:, index]`; takes nn.Conv2d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -3


class IndexedConv3d(_Indexed, nn.Conv3d):
    """nn.Conv3d of `x[:, index]`; takes nn.Conv3d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -4


INDEXED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: IndexedLinear,
    nn.Conv1d: IndexedConv1d,
    nn.Conv2d: IndexedConv2d,
    nn.Conv3d: IndexedConv3d,
}


def can_index(module: nn.Module) -> bool:
    """Whether `with_index` takes this module: a Linear or Conv that runs the forward of nn.Linear or nn.Conv."""
    return _indexed_class(module) is not None


def with_index(module: nn.Module, index: Tensor) -> nn.Module:
    """`module` reading `x[index]` along the channels: a new module with the same Parameters, hooks and flags.

    Weight and in_features (in_channels) are already as wide as `index`. A module that is indexed already composes.
    """
    cls = _indexed_class(module)
    if cls is None:
        raise TypeError(f"{type(module).__name__} runs code of its own; only a plain Linear or Conv can gather inputs")
    new = cls.__new__(cls)
    vars(new).update(state_of(module))
    old = module.index if isinstance(module, _Indexed) else None
    _set_index(new, index if old is None else old[index.to(old.device)])
    return new


def _indexed_class(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind in INDEXED.values():
        return kind
    # A parametrized module has its weight as a property of its class, and a patched one its forward in its dict.
    if "forward" in vars(module) or "parametrizations" in module._modules:
        return None
    for base, indexed in INDEXED.items():
        theirs, ours = ([getattr(k, name, None) for name in ("forward", "_conv_forward")] for k in (kind, base))
        if isinstance(module, base) and theirs == ours:
            return indexed
    return None


def _set_index(module: nn.Module, index: Tensor) -> None:
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    if index.shape != (width,):
        raise ValueError(f"{type(module).__name__} reads {width} channels, got an index of shape {tuple(index.shape)}")
    weight = next(iter(module.parameters(recurse=False)))
    module.register_buffer("index", index.detach().to(weight.device, torch.int64, copy=True))
