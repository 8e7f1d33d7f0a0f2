"""What a model notes about its own widths follows them: timm's `num_features`, `embed_dim`, `feature_info` and others.

Numbers that the forward reads are none of this: `follow` sets them, and checks them on a trace. Bookkeeping is what is
left: an int (or a list of them) with the name and the value of a width, which the forward never reads, so that setting
it cannot change the function. Code that is not the forward does read it: `reset_classifier` builds a head from it.

Which width it is shows at the borders of modules: the tensor that came in or went out with that extent in the old model
has another one in the new. A module's own borders count first, then those of its children. If they disagree the number
stays as it was, except that `num_features` and `head_hidden_size` are, by timm's convention, what the head reads: of
those the last one counts. Configs of transformers are left alone: generation derives the width of heads from
`hidden_size`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..copies import borrowed
from ..rehearse import Call
from ..trace import ModuleCall, Trace
from .attributes import follows_parameters

_WIDTH = {"features", "channels", "chs", "chans", "planes", "dim", "dims", "width", "hidden", "embed", "model"}
_OF_HEADS = {"heads", "key", "val", "kv", "qk"}
_LAST = ("num_features", "head_hidden_size")

Borders = dict[str, list[tuple[int, ...]]]  # module -> the shapes that came in and went out
Width = int | tuple[int, ...] | list[int]


def update(model: nn.Module, before: list[Trace], after: list[Trace], calls: list[Call]) -> None:
    """Set, on the narrowed model, what its modules note about widths and the forward does not read."""
    old, new = _borders(before), _borders(after)
    wishes = {
        (path, name): (value, follows)
        for path, module in model.named_modules()
        if not follows_parameters(module)
        for name, value in vars(module).items()
        if _is_width(name, value) and (follows := _renamed(name, value, _evidence(path, old, new))) != value
    }
    with borrowed(model) as copy:
        read = _read(copy, calls, set(wishes)) if wishes else set()
    for (path, name), (_, follows) in wishes.items():
        if (path, name) not in read:
            setattr(model.get_submodule(path), name, follows)
    _update_feature_info(model, old, new)


def _is_width(name: str, value: object) -> bool:
    """A number, or several, under a name that speaks of widths: `embed_dim`, not `depth` or `head_dim`."""
    words = set(name.split("_"))
    several = isinstance(value, (tuple, list)) and bool(value) and all(type(v) is int for v in value)
    of_heads = bool(words & _OF_HEADS) or ("head" in words and "hidden" not in words)
    return (type(value) is int or several) and bool(words & _WIDTH) and not of_heads


def _renamed(name: str, value: Any, levels: list[list[tuple[int, int]]]) -> Any:
    """The number, or each of several, as the borders say."""
    if isinstance(value, int):
        return _new_width(value, levels, last=name in _LAST)
    return type(value)(_new_width(v, levels, last=False) for v in value)


def _new_width(old: int, levels: list[list[tuple[int, int]]], *, last: bool) -> int:
    """What a width became, by the first level of evidence that knows it."""
    for level in levels:
        seen = [now for was, now in level if was == old]
        if seen:
            return seen[-1] if last or len(set(seen)) == 1 else old
    return old


def _evidence(path: str, old: Borders, new: Borders) -> list[list[tuple[int, int]]]:
    """Widths before and after: at the borders of a module, then at those of its children."""
    prefix = f"{path}." if path else ""
    children = [name for name in old if name and name.startswith(prefix) and "." not in name[len(prefix) :]]
    return [[pair for name in names for pair in _pairs(name, old, new)] for names in ([path], children)]


def _pairs(name: str, old: Borders, new: Borders) -> Iterator[tuple[int, int]]:
    """Where a tensor changed, that extent was its width; where it did not, its width is what it was."""
    for was, now in zip(old.get(name, ()), new.get(name, ()), strict=False):
        changed = [(a, b) for a, b in zip(was, now, strict=False) if a != b]
        yield from changed or [(was[d], was[d]) for d in _channel_dims(was)]


def _channel_dims(shape: tuple[int, ...]) -> set[int]:
    """The last dimension or dimension 1; in an image two equal extents side by side are taken for height and width."""
    if len(shape) >= 4 and shape[-1] == shape[-2] != shape[1]:
        return {1}
    if len(shape) >= 4 and shape[1] == shape[2] != shape[-1]:
        return {len(shape) - 1}
    return {d for d in (1, len(shape) - 1) if 0 <= d < len(shape)}


def _borders(traces: list[Trace]) -> Borders:
    calls: dict[str, ModuleCall] = {}
    for trace in traces:
        for name, call in trace.calls.items():
            if call.count and name not in calls:
                calls[name] = call
    return {name: [call.shape_in or (), call.shape_out or ()] for name, call in calls.items()}


def _update_feature_info(model: nn.Module, old: Borders, new: Borders) -> None:
    """timm: a list of {"module": ..., "num_chs": ...}, the width that this module hands on."""
    for path, module in model.named_modules():
        info = vars(module).get("feature_info")
        info = getattr(info, "info", info)
        for entry in info if isinstance(info, (list, tuple)) else ():
            if isinstance(entry, dict) and isinstance(entry.get("num_chs"), int) and "module" in entry:
                name = f"{path}.{entry['module']}" if path else str(entry["module"])
                shapes = [borders[name][1:] for borders in (old, new) if name in borders]
                if len(shapes) == 2:
                    pairs = list(_pairs(name, {name: shapes[0]}, {name: shapes[1]}))
                    entry["num_chs"] = _new_width(entry["num_chs"], [pairs], last=False)


def _read(model: nn.Module, calls: list[Call], wishes: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Which of these attributes the model reads when it is called."""
    read: set[tuple[str, str]] = set()
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        for path in {path for path, _ in wishes}:
            module = model.get_submodule(path)
            undo.callback(setattr, module, "__class__", type(module))
            marks = {name: (path, name) for at, name in wishes if at == path}
            module.__class__ = _watched(type(module), marks, read)
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
            module.training = False
        for args, kwargs in calls:
            model(*args, **kwargs)
    return read


def _watched(cls: type[nn.Module], marks: dict[str, tuple[str, str]], read: set[tuple[str, str]]) -> type[nn.Module]:
    """A subclass that leaves a mark when one of these attributes is read."""

    def look_up(self: nn.Module, name: str) -> Any:
        if name in marks:
            read.add(marks[name])
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": look_up, "__module__": cls.__module__})
