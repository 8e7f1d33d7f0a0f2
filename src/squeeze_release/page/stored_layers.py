"""The layers of a stored network, before and after, from the header of its file: no model is built, no tensor read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..modules import PLACED
from ..report import STAND_INS, Layer
from ..store.archive import Archive, Misfit, opened

_BLOCKS = {kind.__name__ for kind in STAND_INS}
_PLACED = {kind.__name__ for kind in PLACED.values()}
_WIDTHS = (("in_features", "out_features"), ("in_channels", "out_channels"))
# A file has no order of modules. Names tell mostly; these words say that a module is at one end.
_FIRST = {"embed", "embeddings", "patch", "stem", "token", "conv1", "bn1", "pos"}
_LAST = {"head", "fc", "classifier", "norm", "final", "pooler"}


@dataclass(frozen=True)
class _Side:
    """A network, as it was or as it is: of its modules the classes, numbers and shapes."""

    kinds: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, Any]]
    shapes: Mapping[str, list[list[int]]]  # of the parameters of a module, its weight last
    places: Mapping[str, int]  # how wide a layer is that places its outputs among constants

    def width(self, path: str) -> str:
        """As in `Report`: inputs and outputs of a layer, or its class and the shape of a parameter."""
        kind, numbers, shapes = self.kinds.get(path, ""), self.numbers.get(path, {}), self.shapes.get(path)
        for one, other in _WIDTHS:
            if one in numbers and other in numbers and kind not in _BLOCKS:
                wide = f" of {self.places[path]}" if path in self.places else ""
                return f"{numbers[one]} -> {numbers[other]}{wide}"
        return f"{kind} {'x'.join(map(str, shapes[-1]))}" if shapes else kind


def stored_layers(file: Path) -> tuple[Layer, ...]:
    """All layers with parameters, changed or not, in the order that their names suggest."""
    try:
        with opened(file) as archive:
            return _layers(archive)
    except (Misfit, OSError) as error:
        raise InputError(
            f"{file.name} cannot be read: {error}",
            where=file.parent.name,
            consequence="no page was written",
            remedy="delete the file to get a page without its layers, or run again",
        ) from error


def _layers(archive: Archive) -> tuple[Layer, ...]:
    full, tied = archive.contents["full"], {name for names in archive.contents["ties"].values() for name in names}
    gone = {path: str(made.get("class")) for path, made in archive.contents["stand_ins"].items()}
    was = {name: shape for name, shape in full["parameters"].items() if name not in tied}
    now = {name: archive.shape(name) for name in archive.names if _is_parameter(name, archive.contents)}
    placed = {path: archive.shape(f"{path}.place".lstrip("."))[0] for path, kind in gone.items() if kind in _PLACED}
    before = _Side(full["modules"], full["settings"], _by_module(was), {})
    after = _Side(full["modules"] | gone, _numbers_now(archive.contents), _by_module(now), placed)
    sizes: dict[str, list[int]] = {}
    for at, side in enumerate((before, after)):
        for path, shapes in side.shapes.items():
            sizes.setdefault(_owner(path, gone), [0, 0])[at] += sum(map(math.prod, shapes))
    return tuple(
        Layer(path or "(model)", before.width(path), after.width(path), *sizes[path])
        for path in sorted(sizes, key=_place)
    )


def _by_module(parameters: Mapping[str, list[int]]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for name in sorted(parameters):
        found.setdefault(name.rpartition(".")[0], []).append(parameters[name])
    return found


def _numbers_now(contents: dict[str, Any]) -> dict[str, dict[str, Any]]:
    settings, changed = contents["full"]["settings"], contents["numbers"]
    return {
        path: settings.get(path, {}) | {name: pair[-1] for name, pair in changed.get(path, {}).items() if pair}
        for path in {*settings, *changed}
    }


def _is_parameter(name: str, contents: dict[str, Any]) -> bool:
    """Not a buffer: a parameter of the full-size model, one of a stand-in, or a bias that a layer got."""
    path, _, own = name.rpartition(".")
    parameters, stand_in = contents["full"]["parameters"], contents["stand_ins"].get(path, {})
    new = {"Shift": "bias", "Constant": "value"}.get(str(stand_in.get("class")))
    got = own == "bias" and (f"{path}.weight" if path else "weight") in parameters
    return name in parameters or own == new or got or (own == "fill" and bool(stand_in.get("trained")))


def _owner(path: str, gone: Mapping[str, str]) -> str:
    """The module that parameters count with: what was inside a block that is gone counts with the block."""
    return next((outer for outer in _outer(path) if gone.get(outer) in _BLOCKS), path)


def _outer(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def _place(path: str) -> tuple[int, list[tuple[int, int | str]]]:
    """To sort by: 10 comes after 2, a stem first and a head last."""
    words = {*re.split(r"[._]", path.partition(".")[0])}
    end = -1 if words & _FIRST else 1 if words & _LAST else 0
    return end, [(0, int(part)) if re.fullmatch("[0-9]{1,9}", part) else (1, part) for part in path.split(".")]
