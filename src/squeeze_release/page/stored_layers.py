"""The layers of a stored network, before and after, from the header of its file: no model is built, no tensor read."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..report import STAND_INS, Layer
from ..store.archive import Archive, Misfit, opened

_BLOCKS = {kind.__name__ for kind in STAND_INS}
_WIDTHS = (("in_features", "out_features"), ("in_channels", "out_channels"))
# A file has no order of modules. Names tell mostly; these words say that a module is at one end.
_FIRST = {"embed", "embeddings", "patch", "stem", "token", "conv1", "bn1", "pos"}
_LAST = {"head", "fc", "classifier", "norm", "final", "pooler"}


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
    contents = archive.contents
    before = {name: shape for name, shape in contents["full"]["parameters"].items() if name not in _tied(contents)}
    after = {name: archive.shape(name) for name in archive.names if _is_parameter(name, contents)}
    rows: dict[str, list[int]] = {}
    for at, shapes in enumerate((before, after)):
        for name, shape in shapes.items():
            rows.setdefault(_owner(name, contents), [0, 0])[at] += math.prod(shape)
    return tuple(
        Layer(path or "(model)", _width(path, before, contents, 0), _width(path, after, contents, 1), was, now)
        for path, (was, now) in sorted(rows.items(), key=lambda row: _place(row[0]))
    )


def _tied(contents: dict[str, Any]) -> set[str]:
    return {name for names in contents["ties"].values() for name in names}


def _is_parameter(name: str, contents: dict[str, Any]) -> bool:
    """Not a buffer: a parameter of the full-size model, one of a stand-in, or a bias that a layer got."""
    path, _, own = name.rpartition(".")
    stand_in = contents["stand_ins"].get(path, {})
    new = {"Shift": "bias", "Constant": "value"}.get(str(stand_in.get("class")))
    parameters = contents["full"]["parameters"]
    weight = f"{path}.weight" if path else "weight"
    got = own == "bias" and weight in parameters
    return name in parameters or own == new or got or (own == "fill" and bool(stand_in.get("trained")))


def _owner(name: str, contents: dict[str, Any]) -> str:
    """The module that a parameter counts with: what was inside a block that is gone counts with the block."""
    path = name.rpartition(".")[0]
    parts = path.split(".")
    for length in range(len(parts)):
        outer = ".".join(parts[:length])
        if str(contents["stand_ins"].get(outer, {}).get("class")) in _BLOCKS:
            return outer
    return path


def _width(path: str, shapes: dict[str, Any], contents: dict[str, Any], at: int) -> str:
    """As in `Report`: inputs and outputs of a layer, or its class and the shape of its first parameter."""
    kind, settings = contents["full"]["modules"].get(path, ""), contents["full"]["settings"].get(path, {})
    if at == 1:
        kind = str(contents["stand_ins"].get(path, {}).get("class", kind))
        settings = settings | {name: pair[-1] for name, pair in contents["numbers"].get(path, {}).items() if pair}
    for one, other in _WIDTHS:
        if {one, other} <= settings.keys() and kind not in _BLOCKS:
            return f"{settings[one]} -> {settings[other]}"
    own = [shape for name, shape in shapes.items() if name.rpartition(".")[0] == path]
    return f"{kind} {'x'.join(map(str, own[-1]))}" if own else str(kind)


def _place(path: str) -> tuple[int, list[tuple[int, int | str]]]:
    """To sort by: 10 comes after 2, a stem first and a head last."""
    words = {*re.split(r"[._]", path.partition(".")[0])}
    end = -1 if words & _FIRST else 1 if words & _LAST else 0
    return end, [(0, int(part)) if part.isdigit() else (1, part) for part in path.split(".")]
