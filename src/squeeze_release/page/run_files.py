"""What the files of a run say; see `cycle/directory.py`. One that is not finished can be read too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ..cycle.config import Point
from ..errors import InputError
from ..report import Layer
from .stored_layers import stored_layers


@dataclass(frozen=True)
class EpochLine:
    phase: str
    cycle: int
    accuracy: float
    alive: int
    weights: int
    seconds: float
    undone: bool = False


@dataclass(frozen=True)
class SqueezeLine:
    cycle: int
    mask_alive: int
    params_before: int
    params_after: int
    max_error: float
    max_difference: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    accuracy: float
    validation_accuracy: float
    mask_alive: int
    deployable_weights: int
    deployable_params: int
    unpruned_weights: int
    unpruned_params: int
    max_error: float
    seconds: float


Line = TypeVar("Line", bound=EpochLine | SqueezeLine | Point | Summary)
_LINES: dict[str, type[EpochLine] | type[SqueezeLine] | type[Point]] = {
    "epoch": EpochLine,
    "squeeze": SqueezeLine,
    "cycle": Point,
}


@dataclass(frozen=True)
class RunFiles:
    name: str
    mode: str
    floor: float | None
    epochs: tuple[EpochLine, ...]
    squeezes: tuple[tuple[int, SqueezeLine], ...]  # each after how many epochs
    points: tuple[Point, ...]
    summary: Summary | None
    layers: tuple[Layer, ...]

    @property
    def chosen(self) -> Point | None:
        """The cycle whose network the run went on with at its end: the last fine-tuning leaves its size alone."""
        if self.summary is None:
            return None
        name = "mask_alive" if self.mode == "baseline" else "deployable_params"
        same = (point for point in self.points if getattr(point, name) == getattr(self.summary, name))
        return next(reversed([*same]), None)

    @property
    def max_error(self) -> float | None:
        return max((line.max_error for _, line in self.squeezes), default=None)


def read_run(folder: str | Path) -> RunFiles:
    folder = Path(folder)
    config = _json(folder / "config.json")
    epochs: list[EpochLine] = []
    squeezes: list[tuple[int, SqueezeLine]] = []
    points: list[Point] = []
    for line in _metrics(folder / "metrics.jsonl"):
        if isinstance(line, EpochLine):
            epochs.append(line)
        elif isinstance(line, SqueezeLine):
            squeezes.append((len(epochs), line))
        else:
            points.append(line)
    summary = folder / "summary.json"
    return RunFiles(
        folder.resolve().name,
        str(config.get("mode", "")),
        _floor(config, folder, points),
        tuple(epochs),
        tuple(squeezes),
        tuple(points),
        _made(Summary, _json(summary), summary.name) if summary.exists() else None,
        _layers(folder),
    )


def _layers(folder: Path) -> tuple[Layer, ...]:
    """Of the network that came out, or of the last one so far."""
    final, networks = folder / "final.safetensors", sorted(folder.glob("cycle-*.safetensors"))
    newest = final if final.exists() else (networks[-1] if networks else None)
    return stored_layers(newest) if newest is not None else ()


def _floor(config: dict[str, Any], folder: Path, points: list[Point]) -> float | None:
    for name in ("min_accuracy", "max_loss"):
        value = config.get(name)
        if value is not None and not (_is_number(value) and math.isfinite(value)):
            raise _misfit(f"{name} is {value!r}, no number", f"config.json of {folder.name}")
    loss = config.get("max_loss")
    if loss is not None:
        return points[0].accuracy - loss if points else None
    return config.get("min_accuracy")


def _metrics(file: Path) -> list[EpochLine | SqueezeLine | Point]:
    if not file.exists():
        return []
    found: list[EpochLine | SqueezeLine | Point] = []
    lines = _text(file).splitlines()
    for number, text in enumerate(lines, 1):
        where = f"line {number} of {file.name}"
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(lines):  # a run that was killed, or is just writing it
                break
            raise _misfit("not JSON", where) from None
        kind = _LINES.get(str(line.get("event"))) if isinstance(line, dict) else None
        if kind is None:
            raise _misfit("neither an epoch, a squeeze nor a cycle", where)
        found.append(_made(kind, line, where))
    return found


def _made(kind: type[Line], line: dict[str, Any], where: str) -> Line:
    """The fields of a line that the page shows, each of the type it has."""
    wanted = {field.name: str(field.type) for field in fields(kind)}
    taken = {name: line[name] for name in wanted if name in line}
    for name, value in taken.items():
        right = isinstance(value, {"str": str, "bool": bool}.get(wanted[name], object))
        if not right or (wanted[name] in ("int", "float") and not _is_number(value)):
            raise _misfit(f"{name} is {value!r:.60}, not a {wanted[name]}", where)
    try:
        return kind(**taken)
    except TypeError:
        missing = ", ".join(sorted(wanted.keys() - taken.keys()))
        raise _misfit(f"without {missing}", where) from None


def _is_number(value: Any) -> bool:
    """One that can be drawn; NaN is one of a run that failed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 1e300


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(file))
    except ValueError:
        raise _misfit("not JSON", file.name) from None
    if not isinstance(found, dict):
        raise _misfit("not a table of names and values", file.name)
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file.name} cannot be read: {type(error).__name__}",
            where=str(file.parent),
            consequence="no page was written",
            remedy="give the folder of a run: the run_dir of cycle, or --run-dir of squeeze-release run",
        ) from error


def _misfit(what: str, where: str) -> InputError:
    return InputError(
        what,
        where=where,
        consequence="no page was written",
        remedy="the file was changed since the run wrote it: run again, or resume the run",
    )
