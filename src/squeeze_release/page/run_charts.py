"""The pictures of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from ..cycle.config import Point
from . import formats
from .charts import BOTTOM, Axis, across, chart, diamonds, dots, down, line, text, tight_x_axis, x_axis, y_axis
from .legend import Entries, figure
from .markup import Markup, joined, tag
from .run_files import RunFiles

PHASES = {"train": "training", "prune": "pruning", "finetune": "fine-tuning", "final": "last fine-tuning"}
BOUND = 1e-10  # what `verify` lets through
_FOOT = 1e-17  # where an error of 0 is drawn on a log axis
_MOST_NUMBERED = 12


def size_accuracy(run: RunFiles) -> Markup:
    """Every cycle's network: how large, and how accurate. With the floor, and the network that was chosen."""
    masked = run.mode == "baseline"  # whose networks stay large until the end
    named = "weights not zero" if masked else "parameters"
    at = [(float(p.mask_alive if masked else p.deployable_params), p.accuracy) for p in run.points]
    end = _result(run, masked)
    sizes = [size for size, _ in (*at, *end)]
    heights = [height for _, height in (*at, *end)] + ([] if run.floor is None else [run.floor])
    log = max(sizes) > 5 * max(min(sizes), 1)
    x = x_axis(sizes, f"{named}{', log scale' if log else ''}", formats.compact, log=log)
    y = y_axis(heights, "accuracy", _percents(heights))
    both = [*zip(run.points, at, strict=True)]
    titles = [f"cycle {p.cycle}: {formats.count(s)} {named}, {formats.percent(a)}" for p, (s, a) in both]
    ring = [spot for point, spot in both if point is run.chosen]
    picture = chart(
        f"Validation accuracy against {named}, a point for every cycle. " + "; ".join(titles[:_MOST_NUMBERED]),
        x,
        y,
        across(run.floor, y, "floor") if run.floor is not None else joined(),
        line(at, x, y, "s1"),
        dots(at, titles, x, y, "dot s1"),
        dots(ring, ["chosen"] * len(ring), x, y, "ring", 8),
        diamonds(end, ["after the last fine-tuning"] * len(end), x, y, "diamond"),
        *_numbers(run, at, x, y),
    )
    return figure("Validation accuracy against size", picture, _entries(run, masked))


def _result(run: RunFiles, masked: bool) -> list[tuple[float, float]]:
    if run.summary is None:
        return []
    size = run.summary.mask_alive if masked else run.summary.deployable_params
    return [(float(size), run.summary.validation_accuracy)]


def _entries(run: RunFiles, masked: bool) -> Entries:
    entries = [("dot s1", "end of a cycle, with its number")]
    if run.floor is not None:
        entries.append(("floor", f"floor, {formats.percent(run.floor)}"))
    if run.chosen is not None:
        entries.append(("ring", f"chosen: cycle {run.chosen.cycle}, {_described(run.chosen, masked)}"))
    for _, accuracy in _result(run, masked):
        entries.append(("diamond", f"after the last fine-tuning: {formats.percent(accuracy)}"))
    return entries


def _described(point: Point, masked: bool) -> str:
    size = (
        f"{formats.count(point.mask_alive)} weights" if masked else f"{formats.count(point.deployable_params)} params"
    )
    return f"{size}, {formats.percent(point.accuracy)}"


def _numbers(run: RunFiles, at: list[tuple[float, float]], x: Axis, y: Axis) -> list[Markup]:
    """The cycles beside their points; of many only those that matter."""
    shown = []
    for place, (point, (size, accuracy)) in enumerate(zip(run.points, at, strict=True)):
        matters = len(at) <= _MOST_NUMBERED or place in (0, len(at) - 1) or point is run.chosen
        if matters and math.isfinite(accuracy) and size > 0:
            shown.append(text(str(point.cycle), x(size) + 9, y(accuracy) + 15, "start", "mark"))
    return shown


# ------------------------------------------------------------------------------------------------------ over the epochs


def over_epochs(run: RunFiles) -> list[Markup]:
    """Accuracy, weights, seconds and errors; the first three share their axis."""
    return [_accuracy(run), _weights(run), _seconds(run), *([_errors(run)] if run.squeezes else [])]


def _accuracy(run: RunFiles) -> Markup:
    """An update that was undone may have cost all accuracy: it must not flatten the rest of the curve."""
    at = [(float(number), epoch.accuracy) for number, epoch in enumerate(run.epochs, 1)]
    lasted = [point for point, epoch in zip(at, run.epochs, strict=True) if not epoch.undone]
    values = [accuracy for _, accuracy in lasted]
    x, y = _epochs(run), y_axis(values, "accuracy", _percents(values))
    undone = [point for point, epoch in zip(at, run.epochs, strict=True) if epoch.undone]
    titles = [f"an update that was undone: {formats.percent(accuracy)}" for _, accuracy in undone]
    lower = any(accuracy < y.low for _, accuracy in undone)
    picture = chart(
        "Validation accuracy after every epoch",
        x,
        y,
        _squeezes(run, x),
        line(lasted, x, y, "s1"),
        _strip(run, x),
        dots([(epoch, max(accuracy, y.low)) for epoch, accuracy in undone], titles, x, y, "dot s3"),
    )
    entries = [("dot s3", f"update undone{', at the foot where it is lower' if lower else ''}")] if undone else []
    return figure("Validation accuracy", picture, entries)


def _weights(run: RunFiles) -> Markup:
    stored, alive = ([float(getattr(epoch, name)) for epoch in run.epochs] for name in ("weights", "alive"))
    shown = [value for value in (*stored, *alive) if value > 0]
    log = bool(shown) and max(shown) > 5 * min(shown)
    x, y = _epochs(run), y_axis([*shown] if log else [0.0, *shown], "weights", formats.compact, log=log)
    picture = chart(
        "Prunable weights after every epoch: stored in dense tensors, and not zero",
        x,
        y,
        _squeezes(run, x),
        line(_numbered(stored), x, y, "s4", steps=True),
        line(_numbered(alive), x, y, "s1"),
        _strip(run, x),
    )
    name = f"Prunable weights{', log scale' if log else ''}"
    return figure(name, picture, [("s4", "stored"), ("s1", "not zero")])


def _seconds(run: RunFiles) -> Markup:
    values = [epoch.seconds for epoch in run.epochs]
    x, y = _epochs(run), y_axis([0.0, *values], "seconds", lambda value: f"{value:g} s")
    picture = chart(
        "Seconds of every training epoch", x, y, _squeezes(run, x), line(_numbered(values), x, y, "s1"), _strip(run, x)
    )
    return figure("Seconds a training epoch", picture, [])


def _errors(run: RunFiles) -> Markup:
    at = [(float(number), line.max_error) for number, (_, line) in enumerate(run.squeezes, 1)]
    titles = [f"squeeze {number:.0f}: {formats.power(error)}" for number, error in at]
    spots = [(number, max(error, _FOOT)) for number, error in at]
    x = tight_x_axis(0.5, len(at) + 0.5, "squeeze", _whole)
    y = y_axis([*(error for _, error in spots), BOUND], "error", formats.power, log=True)
    picture = chart(
        "Relative error of every squeeze in float64. " + "; ".join(titles[:_MOST_NUMBERED]),
        x,
        y,
        across(BOUND, y, "floor"),
        dots(spots, titles, x, y, "dot s1"),
    )
    zero = ", at the foot where it is 0" if any(error == 0 for _, error in at) else ""
    entries = [("dot s1", f"a squeeze{zero}"), ("floor", f"bound, {formats.power(BOUND)}")]
    return figure("Relative error of each squeeze, float64", picture, entries)


def _epochs(run: RunFiles) -> Axis:
    return tight_x_axis(0.5, len(run.epochs) + 0.5, "epoch", _whole)


def _whole(value: float) -> str:
    """There is no half epoch."""
    return formats.count(value) if value == round(value) else ""


def _numbered(values: list[float]) -> list[tuple[float, float]]:
    return [(float(number), value) for number, value in enumerate(values, 1)]


def _squeezes(run: RunFiles, x: Axis) -> Markup:
    return joined(*(down(at + 0.5, x, "squeeze") for at, _ in run.squeezes))


def _strip(run: RunFiles, x: Axis) -> Markup:
    """What the run did, below the axis."""
    parts, done = [], 0
    for phase, lines in itertools.groupby(run.epochs, key=lambda epoch: epoch.phase):
        many = len([*lines])
        left, right = x(done + 0.5), x(done + many + 0.5)
        title = tag("title", f"{PHASES.get(phase, phase)}, {many} epochs")
        class_ = f"phase {phase}" if phase in PHASES else "phase"
        parts.append(tag("rect", title, x=left, width=round(right - left, 1), y=BOTTOM, height=6, class_=class_))
        done += many
    return joined(*parts)


def phases(run: RunFiles) -> Entries:
    """The legend of the strips."""
    seen = {epoch.phase for epoch in run.epochs}
    entries = [(f"phase {phase}", name) for phase, name in PHASES.items() if phase in seen]
    return entries + ([("squeeze", "a squeeze")] if run.squeezes else [])


def _percents(values: list[float]) -> Callable[[float], str]:
    """With as many digits as the ticks need."""
    shown = [value for value in values if math.isfinite(value)]
    span = max(shown) - min(shown) if shown else 1.0
    digits = 0 if span >= 0.03 else 1 if span >= 0.003 else 2
    return lambda value: formats.percent(value, digits)
