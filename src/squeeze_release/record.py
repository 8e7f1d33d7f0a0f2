"""What `squeeze` leaves on the model it returns, so that `save` can tell how it differs from the full-size one.

The record is plain data in one attribute of the model: the structure that the model had before its first squeeze, and
the names of the attributes that squeezes have changed since. It goes where the model goes, through copies, training and
further squeezes. Which attributes changed is found by comparing all modules before and after, so that no rule has to
say what it does.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

from torch import nn

from .pretrained import guard_save_pretrained

RECORD = "_squeezed"
_TORCHS_OWN = frozenset({*vars(nn.Module()), RECORD})  # hooks, `training`, parameters: none of them a width
_IN_TRAINING = {"p", "dropout", "inplace", "momentum"}
_MATTER = {"head", "heads", "group", "groups", "eps", "epsilon", "scale", "scaling"}


class Structure(TypedDict):
    """How a model is built, without its weights."""

    parameters: dict[str, list[int]]  # their shapes, under every name they have
    modules: dict[str, str]  # their classes, that of the model itself under ""
    settings: dict[str, dict[str, Any]]  # module -> what else its function depends on: stride, eps, number of heads
    attributes: dict[str, dict[str, Any]]  # module -> the numbers it keeps in plain attributes


class Record(TypedDict):
    full: Structure
    changed: dict[str, list[str]]  # module -> attributes that squeezes have set


class Origin(NamedTuple):
    """A model as it comes into `squeeze`, and what earlier squeezes left on it."""

    structure: Structure
    record: Record


def structure_of(model: nn.Module) -> Structure:
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "parameters": {name: [*p.shape] for name, p in model.named_parameters(remove_duplicate=False)},
        "modules": {path: type(module).__name__ for path, module in modules.items()},
        "settings": {path: found for path, module in modules.items() if (found := _settings(module))},
        "attributes": {path: numbers for path, module in modules.items() if (numbers := _numbers(module))},
    }


def record_of(model: nn.Module) -> Record:
    """The record on a model; that of a model which was never squeezed says that nothing changed."""
    left: Record | None = vars(model).get(RECORD)
    return {"full": structure_of(model), "changed": {}} if left is None else left


def origin_of(model: nn.Module) -> Origin:
    return Origin(structure_of(model), copy.deepcopy(record_of(model)))


def leave_record(model: nn.Module, origin: Origin) -> None:
    """Note on a squeezed model what it was, and what is new since `origin`."""
    changed = {path: {*names} for path, names in origin.record["changed"].items()}
    for path, name in changes(origin.structure, model):
        changed.setdefault(path, set()).add(name)
    put_record(model, {**origin.record, "changed": {path: sorted(names) for path, names in changed.items()}})


def put_record(model: nn.Module, record: Record) -> None:
    vars(model)[RECORD] = record
    guard_save_pretrained(model, record["full"])


def changes(before: Structure, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Module and name of every attribute that has another value now."""
    for path, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        for name, value in before["attributes"].get(path, {}).items():
            if name in own and (type(own[name]) is not type(value) or own[name] != value):
                yield path, name


def _settings(module: nn.Module) -> dict[str, Any]:
    """As JSON has them, which knows no tuples. Of a user's own module only those whose names say that they matter."""
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN and _is_plain(value)}
    if type(module).__module__.startswith("torch.nn."):
        found = {name: value for name, value in own.items() if name not in _IN_TRAINING}
    else:
        found = {name: value for name, value in own.items() if type(value) in (int, float) and _MATTER & _words(name)}
    normal: dict[str, Any] = json.loads(json.dumps(found))
    return normal


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _numbers(module: nn.Module) -> dict[str, Any]:
    return _class_numbers(type(module)) | _plain(vars(module))


def _class_numbers(kind: type[nn.Module]) -> dict[str, Any]:
    """Those that a class gives to all its modules, until one gets a value of its own."""
    bases = [base for base in reversed(kind.__mro__) if base not in (object, nn.Module)]
    return _plain({name: value for base in bases for name, value in vars(base).items() if not name.startswith("__")})


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in attributes.items() if name not in _TORCHS_OWN}
    return {name: copy.deepcopy(value) for name, value in found.items() if _is_plain(value) and _has_number(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _has_number(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float))
