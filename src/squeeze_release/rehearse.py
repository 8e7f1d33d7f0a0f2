"""What a model may not take is tried on the CPU first.

An index out of bounds is an exception there. On a GPU it is the end of the process: every call after it fails.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .copies import hollow_on_cpu

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Rehearsal:
    """Of a model on an accelerator, by a twin on the CPU that holds no weights. A model on the CPU needs none.

    `ready` says whether there is a twin that tells anything: one that runs on the examples. Code that names its device
    does not.
    """

    def __init__(self, model: nn.Module, calls: list[Call]) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        away = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
        self._twin = hollow_on_cpu(model).eval() if away else None
        self.ready = away and all(self._runs(call) for call in calls)

    def allows(self, call: Call) -> bool:
        """Whether the model itself may be tried on it."""
        return not self.ready or self._runs(call)

    @torch.no_grad()
    def _runs(self, call: Call) -> bool:
        assert self._twin is not None
        return runs(self._twin, on_cpu(call))


def on_cpu(call: Call) -> Call:
    there: Call = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), call)
    return there


def runs(model: nn.Module, call: Call) -> bool:
    try:
        model(*call[0], **call[1])
    except Exception:
        return False
    return True
