"""Linear and convolutions that are narrower than what they read or write.

Indexed ones gather their inputs first, so that the writer may stay wider than the reader. Placed ones also compute only
some of their outputs, and place them among constants, so that a stream may stay wider than what one layer writes to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .state import state_of


class _Indexed(nn.Module):
    """Gathers its input channels by `index`, then is the layer it inherits from."""

    index: Tensor | None  # None in a placed layer that reads all its inputs
    _channels_at = -1  # from the end, so that unbatched inputs work

    def __init__(self, *args: Any, index: Tensor | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_index(self, index)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.index is None else x.index_select(self._channels_at, self.index)
        return super().forward(x)  # type: ignore[no-any-return]


class _Placed(_Indexed):
    """Output channel k is `cat(rows, fill)[place[k]]`: rows are what the layer it inherits from computes.

    `fill` holds the outputs that do not depend on the input: a Parameter where they are biases, else a buffer of zeros.
    """

    place: Tensor
    fill: Tensor

    def __init__(self, *args: Any, place: Tensor, fill: Tensor, index: Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, index=index, **kwargs)
        _set_place(self, place, fill)

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)
        at = self._channels_at
        fill = self.fill if self.fill.dtype == rows.dtype else self.fill.to(rows.dtype)  # under autocast
        fill = fill.view(-1, *[1] * (-1 - at)).expand(*rows.shape[:at], -1, *rows.shape[rows.dim() + at + 1 :])
        return torch.cat([rows, fill], at).index_select(at, self.place)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, placed among {len(self.place)}"


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


class PlacedLinear(_Placed, IndexedLinear):
    """IndexedLinear whose outputs are placed among constants; out_features is how many it computes."""


class PlacedConv1d(_Placed, IndexedConv1d):
    """IndexedConv1d whose outputs are placed among constants; out_channels is how many it computes."""


class PlacedConv2d(_Placed, IndexedConv2d):
    """IndexedConv2d whose outputs are placed among constants; out_channels is how many it computes."""


class PlacedConv3d(_Placed, IndexedConv3d):
    """IndexedConv3d whose outputs are placed among constants; out_channels is how many it computes."""


INDEXED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: IndexedLinear,
    nn.Conv1d: IndexedConv1d,
    nn.Conv2d: IndexedConv2d,
    nn.Conv3d: IndexedConv3d,
}
PLACED: dict[type[nn.Module], type[nn.Module]] = {
    IndexedLinear: PlacedLinear,
    IndexedConv1d: PlacedConv1d,
    IndexedConv2d: PlacedConv2d,
    IndexedConv3d: PlacedConv3d,
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


def with_place(module: nn.Module, live: Tensor) -> nn.Module:
    """`module` computing only the rows `live` of its weight, a new module; every other row is its bias, or 0.

    Exact where the weights of all other rows are 0. A module that is placed already composes.
    """
    kind = _indexed_class(module)
    if kind is None:
        raise TypeError(f"{type(module).__name__} runs code of its own; only a plain Linear or Conv can place outputs")
    kind = PLACED.get(kind, kind)
    new = kind.__new__(kind)
    vars(new).update(state_of(module))
    if not isinstance(module, _Indexed):
        _set_index(new, None)
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    live = live.to(weight.device)
    new.register_parameter("weight", _rows_of(weight, live))
    new.register_parameter("bias", None if bias is None else _rows_of(bias, live))
    setattr(new, "out_features" if isinstance(new, nn.Linear) else "out_channels", len(live))
    _set_place(new, *_placement(module, live, weight, bias))
    return new


def _placement(module: nn.Module, live: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each output comes from once only the rows `live` are computed, and the outputs that are constant."""
    rows = torch.arange(len(weight), device=weight.device)
    dead = rows[~torch.isin(rows, live)]
    place, fill = (module.place, module.fill) if isinstance(module, _Placed) else (rows, weight.new_zeros(0))
    order = torch.cat([live, len(rows) + torch.arange(len(fill), device=weight.device), dead])  # new <- old
    constants = weight.new_zeros(len(dead)) if bias is None else bias[dead]
    trained = fill if bias is None else bias  # the zeros of a layer without a bias are no parameters
    fill = torch.cat([fill, constants]).detach()
    if isinstance(trained, nn.Parameter):
        fill = nn.Parameter(fill, requires_grad=trained.requires_grad)
    return order.argsort()[place], fill


def _rows_of(parameter: nn.Parameter, live: Tensor) -> nn.Parameter:
    rows = parameter.detach()[live]
    if parameter.dim() in (4, 5) and not parameter.is_contiguous():  # channels last stays channels last
        rows = rows.contiguous(memory_format=torch.channels_last if rows.dim() == 4 else torch.channels_last_3d)
    return nn.Parameter(rows.contiguous() if parameter.is_contiguous() else rows, parameter.requires_grad)


def _indexed_class(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind in INDEXED.values() or kind in PLACED.values():
        return kind
    # A parametrized module has its weight as a property of its class, and a patched one its forward in its dict.
    if "forward" in vars(module) or "parametrizations" in module._modules:
        return None
    for base, indexed in INDEXED.items():
        theirs, ours = ([getattr(k, name, None) for name in ("forward", "_conv_forward")] for k in (kind, base))
        if isinstance(module, base) and theirs == ours:
            return indexed
    return None


def _set_index(module: nn.Module, index: Tensor | None) -> None:
    if index is None:
        module.register_buffer("index", None)
        return
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    if index.shape != (width,):
        raise ValueError(f"{type(module).__name__} reads {width} channels, got an index of shape {tuple(index.shape)}")
    weight = next(iter(module.parameters(recurse=False)))
    module.register_buffer("index", index.detach().to(weight.device, torch.int64, copy=True))


def _set_place(module: nn.Module, place: Tensor, fill: Tensor) -> None:
    rows, there = len(module.get_parameter("weight")), len(place) and int(place.max()) + 1
    if there > rows + len(fill):
        raise ValueError(f"{type(module).__name__} has {rows} rows and {len(fill)} constants, but places {there}")
    for name in ("place", "fill"):  # another kind of attribute may have had the name
        module._buffers.pop(name, None)
        module._parameters.pop(name, None)
    module.register_buffer("place", place.detach().to(module.get_parameter("weight").device, torch.int64, copy=True))
    if isinstance(fill, nn.Parameter):
        module.register_parameter("fill", fill)
    else:
        module.register_buffer("fill", fill.to(module.get_parameter("weight")))
