"""A full-size model becomes the narrow network that a file describes: its numbers, its stand-ins, its tensors.

A file can set numbers that the model has already, within range; put stand-ins where they can stand; and fill in tensors
of the shapes that the layers need. All else is a `Misfit`. The model here is a copy, so nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..modules.state import CompensatedNorm
from ..record import Structure, put_record, structure_of
from ..rewrite import swap
from .archive import Archive, Misfit
from .network import Slot, join, like, slots, widest
from .shapes import check_module, check_tensor, fits
from .standins import device_of, make

WRONG_MODEL = "build the model with the code and the arguments that built the one which was squeezed"


def rebuild(model: nn.Module, archive: Archive) -> nn.Module:
    """In place, but for a model that is a single layer."""
    contents, full = archive.contents, structure_of(model)
    _compare(contents["full"], full)
    known = {path for path, module in model.named_modules(remove_duplicate=False) if fits(module)}
    _set_numbers(model, contents["numbers"], full)
    model = _put_stand_ins(model, contents["stand_ins"], full)
    _fill(model, archive, known | contents["stand_ins"].keys())
    for path, module in model.named_modules(remove_duplicate=False):
        check_module(module, path, full)
    put_record(model, {"full": full, "changed": {path: sorted(pairs) for path, pairs in contents["numbers"].items()}})
    return model


def _compare(stored: Mapping[str, Any], here: Structure) -> None:
    """Is it the model that was squeezed? The first difference is named."""
    for name, shape in here["parameters"].items():
        was = stored["parameters"].get(name)
        if was != shape:
            had = "nothing" if was is None else f"{was}"
            raise Misfit(f"{shape} in this model, {had} in the squeezed one", name, WRONG_MODEL)
    for name, was in stored["parameters"].items():
        if name not in here["parameters"]:
            raise Misfit(f"nothing in this model, {was} in the squeezed one", name, WRONG_MODEL)
    for path in [*here["modules"], *stored["modules"]]:
        kind, was = _working(here["modules"].get(path)), _working(stored["modules"].get(path))
        if kind != was:
            raise Misfit(
                f"{kind or 'nothing'} in this model, {was or 'nothing'} in the squeezed one", path, WRONG_MODEL
            )
    for path, settings in here["settings"].items():
        for name, value in settings.items():
            was = stored["settings"].get(path, {}).get(name, value)  # another version of torch may not have it
            if was != value and _working(here["modules"][path]):
                what = f"{value!r} in this model, {was!r} in the squeezed one"
                raise Misfit(what, join(path, name), WRONG_MODEL)


def _working(kind: str | None) -> str | None:
    """Not what hands on its input in eval mode: models are built with and without dropout."""
    return None if kind is None or kind == "Identity" or kind.startswith("Drop") else kind


def _set_numbers(model: nn.Module, numbers: Mapping[str, Mapping[str, Any]], full: Structure) -> None:
    for path, pairs in numbers.items():
        for name, pair in pairs.items():
            where = join(path, name)
            if name not in full["attributes"].get(path, {}) or len(pair) != 2:
                raise Misfit("the model has no such number that could be set", where)
            here = full["attributes"][path][name]
            old, new = (like(here, value, full, where) for value in pair)
            if old != here:
                raise Misfit(f"it is {here!r} in this model, it was {old!r} before the squeeze", where, WRONG_MODEL)
            vars(model.get_submodule(path))[name] = new  # no setter, which might run code


def _put_stand_ins(model: nn.Module, stand_ins: Mapping[str, Mapping[str, Any]], full: Structure) -> nn.Module:
    """Outer ones first: those inside them are children of the new module then."""
    made: dict[int, tuple[nn.Module, Mapping[str, Any]]] = {}
    for path in sorted(stand_ins, key=lambda path: len(path.split(".")) if path else 0):
        if path not in full["modules"]:
            raise Misfit("the model has no such module", path)
        try:
            old = model.get_submodule(path)
        except AttributeError:
            raise Misfit("it is part of a module that is replaced as a whole", path) from None
        _, before = made.get(id(old), (None, None))  # under another of its names
        if before is None:
            new = make(old, stand_ins[path], widest(full), path)
            made[id(new)] = new, stand_ins[path]
            model = swap(model, path, new)
        elif before != stand_ins[path]:
            raise Misfit("one module has two stand-ins", path)
    return model


@torch.no_grad()
def _fill(model: nn.Module, archive: Archive, known: set[str]) -> None:
    """Every stored tensor in its place. `known` are the modules whose shapes follow from their numbers."""
    places = slots(model)
    tied: dict[int, set[str]] = {}
    for name, slot in places.items():
        tied.setdefault(id(slot.tensor), set()).add(name)
    filled: set[str] = set()
    for name, names in archive.names.items():
        if name in archive.contents["temporary"] and name not in places:
            continue  # a cache that the model makes when it runs
        if unknown := [each for each in names if each not in places]:
            raise Misfit("the model has no such parameter or buffer", unknown[0])
        mine = [places[each] for each in names]
        if any(slot.tensor is not None and tied[id(slot.tensor)] != {*names} for slot in mine):
            raise Misfit("it shares its tensor with others than in the squeezed model", name, WRONG_MODEL)
        tensor = archive.read(name)
        for slot in mine:
            check_tensor(slot, tensor, exact=slot.path in known)
        _put(mine, archive.own(name, tensor, _device(mine[0])), name not in archive.contents["frozen"])
        filled.update(names)
    for name, slot in places.items():
        if name not in filled and slot.is_persistent and slot.tensor is not None:
            raise Misfit("the file has no such tensor", name)
    for module in model.modules():
        if isinstance(module, CompensatedNorm):
            module._derive()


def _put(mine: list[Slot], tensor: torch.Tensor, trained: bool) -> None:
    old = mine[0].tensor
    if old is not None:  # the same object: an LSTM, for one, holds its weights in a list besides
        old.data = tensor
        old.requires_grad_(isinstance(old, nn.Parameter) and trained and tensor.is_floating_point())
        return
    value = nn.Parameter(tensor, requires_grad=trained) if mine[0].is_parameter else tensor
    for slot in mine:
        setattr(slot.module, slot.name, value)


def _device(slot: Slot) -> torch.device | None:
    return device_of(slot.module) if slot.tensor is None else slot.tensor.device
