"""Branches that run in training only, such as auxiliary heads: what feeds them keeps its width."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..copies import borrowed
from ..rehearse import Call
from ..trace import Trace


def feeds_training_branches(model: nn.Module, call: Call, traces: list[Trace]) -> list[str | tuple[int, ...]]:
    """What goes into modules that only run in training: the name of the module that writes it, or else its shape."""
    idle = {
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters()) and not any(trace.calls[name].count for trace in traces)
    }
    if not any(True for name in idle for _ in model.get_submodule(name).parameters(recurse=False)):
        return []  # a mere container, nn.ModuleList for one, is never called
    writers: dict[int, tuple[str, Tensor]] = {}  # the tensor is held, so that its id stays its own
    found: list[str | tuple[int, ...]] = []

    def watch(name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            tensors = [a for a in args if isinstance(a, Tensor) and name in idle]
            found.extend(writers[id(t)][0] if id(t) in writers else tuple(t.shape) for t in tensors)

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and name not in idle:
                writers.setdefault(id(output), (name, output))

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    with borrowed(model) as copy, torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, module in copy.train().named_modules():
            watch(name, module)
        try:
            copy(*call[0], **call[1])
        except Exception:  # a batch too small for batch norm, say: then there is nothing to learn here
            return []
    return found
