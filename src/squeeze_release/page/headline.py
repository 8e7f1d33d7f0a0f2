"""The top of the page: how much smaller, how exact, how much faster, how accurate."""

from __future__ import annotations

from . import formats
from .contents import Contents
from .markup import Markup, tag

Card = tuple[str, str, str]  # a number, what it is, and more about it
_NO_CARD = ("", "", "")


def header(contents: Contents) -> Markup:
    cards = (_smaller(contents), _exact(contents), _faster(contents), _accurate(contents))
    shown = [
        tag("li", tag("strong", big), tag("span", what), tag("small", detail)) for big, what, detail in cards if big
    ]
    return tag("header", tag("h1", _title(contents)), tag("p", _subtitle(contents)), tag("ul", *shown, class_="cards"))


def _title(contents: Contents) -> str:
    sizes = contents.sizes
    if sizes is None or sizes[0] == sizes[1]:
        return "Nothing became smaller" if sizes else "How fast it is"
    return f"{formats.count(sizes[0])} parameters became {formats.count(sizes[1])}"


def _subtitle(contents: Contents) -> str:
    run = contents.run
    if run is not None and contents.report is None:
        cycles = max(len(run.points) - 1, 0)
        state = "" if run.summary is not None else ", not finished"
        return f"squeeze-release, run {run.name}: {_many(cycles, 'cycle')}, {_many(len(run.epochs), 'epoch')}{state}"
    return "squeeze-release: the same function in a smaller dense network"


def _smaller(contents: Contents) -> Card:
    if contents.sizes is None:
        return _NO_CARD
    before, after = contents.sizes
    left = formats.percent(after / max(before, 1))
    return formats.ratio(before, after), "smaller", f"{left} of the parameters are left"


def _exact(contents: Contents) -> Card:
    if contents.report is not None:
        proof = contents.report.verification
        if proof is None:
            return formats.NONE, "not verified", "squeeze ran with verify=False"
        said = f"relative error in float64, the largest of {_many(len(proof.variants), 'comparison')}"
        return formats.power(proof.max_error), "exact to", said
    error = contents.run.max_error if contents.run is not None else None
    if error is None or contents.run is None:
        return _NO_CARD
    said = f"relative error in float64, the largest of {_many(len(contents.run.squeezes), 'squeeze')}"
    return formats.power(error), "exact to", said


def _faster(contents: Contents) -> Card:
    pair = contents.bench.headline if contents.bench is not None else None
    if pair is None or contents.bench is None:
        return _NO_CARD
    before, after = (row.seconds_median for row in pair)
    seconds = f"{formats.duration(before)} → {formats.duration(after)}"
    said = f"{seconds} for a batch of {formats.count(pair[1].batch)}, {contents.bench.where}"
    return formats.ratio(before, after), "faster" if after <= before else "as fast", said


def _accurate(contents: Contents) -> Card:
    run = contents.run
    if run is None or run.summary is None or not run.points:
        return _NO_CARD
    now, start = formats.percent(run.summary.validation_accuracy), formats.percent(run.points[0].accuracy)
    said = f"validation {now}; the unpruned network {start}"
    same = run.summary.accuracy == run.summary.validation_accuracy  # where no test was given
    return formats.percent(run.summary.accuracy), "accurate" if same else "test accuracy", said


def _many(number: int, what: str) -> str:
    return f"{formats.count(number)} {what}{'s' * (number != 1)}"
