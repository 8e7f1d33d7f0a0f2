"""A network as plain data: its tensors, and how it differs from the full-size model it comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..record import RECORD, Record, Structure, changes, record_of
from .archive import Misfit
from .standins import PLAIN, STAND_INS, numbers_of, takes_over


class Slot(NamedTuple):
    """A place for a tensor: a parameter or buffer of a module."""

    path: str  # of the module
    module: nn.Module
    name: str

    @property
    def full_name(self) -> str:
        return join(self.path, self.name)

    @property
    def is_parameter(self) -> bool:
        return self.name in self.module._parameters

    @property
    def is_persistent(self) -> bool:
        return self.name not in self.module._non_persistent_buffers_set

    @property
    def tensor(self) -> Tensor | None:
        return (self.module._parameters if self.is_parameter else self.module._buffers)[self.name]


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer under every name it has, those that are None included."""
    found = [
        Slot(path, module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *module._buffers)
    ]
    return {slot.full_name: slot for slot in found}


def describe(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, each once, and all else that `load` needs to know.

    All buffers are stored, not only those of the state dict: where the model was moved to another dtype, a freshly
    built one has other numbers in them.
    """
    record = record_of(model)
    if RECORD not in vars(model) and (part := [path for path, m in model.named_modules() if RECORD in vars(m)]):
        remedy = "save this part by itself, and put it in its place after load"
        raise Misfit("a part of the model was squeezed by itself", part[0], remedy)
    places = dict(sorted(slots(model).items()))  # so that the same network gives the same file
    tensors, ties = _tensors(places.values())
    modules = dict(model.named_modules(remove_duplicate=False))
    return tensors, {
        "package": _version(),
        "full": {key: record["full"][key] for key in ("parameters", "modules", "settings")},
        "stand_ins": {path: numbers_of(m) for path, m in modules.items() if _is_replaced(path, m, record["full"])},
        "numbers": _numbers(model, record),
        "ties": ties,
        "frozen": [name for name, t in tensors.items() if isinstance(t, nn.Parameter) and not t.requires_grad],
        "temporary": [name for name in tensors if not places[name].is_persistent],
    }


def _tensors(slots: Iterable[Slot]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """By the first of their names, and the others."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for slot in slots:
        if slot.tensor is not None:
            mine = names.setdefault(id(slot.tensor), [])
            mine.append(slot.full_name)
            tensors[mine[0]] = slot.tensor
    return tensors, {mine[0]: mine[1:] for mine in names.values() if len(mine) > 1}


def _is_replaced(path: str, module: nn.Module, full: Structure) -> bool:
    was, kind = full["modules"].get(path), type(module)
    if was == kind.__name__:
        if kind.get_extra_state is not nn.Module.get_extra_state:
            remedy = "store what get_extra_state returns by yourself"
            raise Misfit(f"{kind.__name__} keeps state that is not a tensor", path, remedy)
        return False
    if was is None or (STAND_INS | PLAIN).get(kind.__name__) is not kind:
        raise Misfit(f"{kind.__name__} is not what was here before the squeeze: {was or 'nothing'}", path)
    return True


def _numbers(model: nn.Module, record: Record) -> dict[str, dict[str, Any]]:
    """Old and new of what squeezes changed, and of widths that were changed by hand in layers of torch."""
    full = record["full"]
    found: dict[str, dict[str, Any]] = {}
    for path, name in changes(full, model):
        module, old = model.get_submodule(path), full["attributes"][path][name]
        by_hand = type(old) is int and type(module).__module__.startswith("torch.nn.")
        own = type(module).__name__ == full["modules"][path] or takes_over(type(module))
        if own and (by_hand or name in record["changed"].get(path, ())):
            pair = json.loads(json.dumps([old, vars(module)[name]]))
            like(old, pair[1], full, join(path, name))
            found.setdefault(path, {})[name] = pair
    return found


def like(here: Any, value: Any, full: Structure, where: str) -> Any:
    """A value from JSON as what it stands for: of the type of `here`, and the same apart from its numbers."""
    if type(here) in (list, tuple) and type(value) is list and len(value) == len(here):
        return type(here)(like(a, b, full, where) for a, b in zip(here, value, strict=True))
    if type(here) is dict and type(value) is dict and here.keys() == value.keys():
        return {key: like(here[key], value[key], full, where) for key in here}
    if type(value) is type(here) and type(value) not in (list, tuple, dict):
        if value == here or type(value) is bool or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is int and 0 <= value <= max(here, widest(full)):
            return value
    raise Misfit(f"it is {_short(here)} in the full-size model and cannot become {_short(value)}", where)


def widest(full: Structure) -> int:
    """No width of the narrow network is larger."""
    return max((extent for shape in full["parameters"].values() for extent in shape), default=0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _version() -> str:
    from .. import __version__

    return __version__
