"""The parts of the page, from what there is: each is a piece of HTML, or None where there is nothing to say."""

from __future__ import annotations

from . import formats
from .contents import Contents
from .drawing import bars, silhouette
from .environment import environment, without_paths
from .headline import header
from .legend import legend
from .markup import Markup, breakable, joined, tag
from .run_charts import over_epochs, phases, size_accuracy
from .run_files import RunFiles
from .tables import Number, table


def page_body(contents: Contents) -> Markup:
    parts = (header, _curve, _epochs, _network, _totals, _speed, _kept, _checks, _environment)
    return joined(*(part(contents) for part in parts))


def _section(name: str, *children: Markup | None, note: str = "") -> Markup:
    return tag("section", tag("h2", name), tag("p", note, class_="note") if note else None, *children)


# ---------------------------------------------------------------------------------------------------------------- a run


def _curve(contents: Contents) -> Markup | None:
    run = contents.run
    if run is None or not run.points:
        return None
    errors = {line.cycle: line for _, line in run.squeezes}
    rows = []
    for point in run.points:
        squeeze = errors.get(point.cycle)
        rows.append(
            (
                Number(point.cycle, f"{'◎ ' if point is run.chosen else ''}{point.cycle}"),
                Number(point.deployable_params, formats.count(point.deployable_params)),
                Number(point.mask_alive, formats.count(point.mask_alive)),
                Number(point.accuracy, formats.percent(point.accuracy)),
                Number(squeeze.max_error, formats.power(squeeze.max_error)) if squeeze else Number(-1, formats.NONE),
            )
        )
    names = ("cycle", "parameters", "not zero", "accuracy", "error")
    cycles = table(_about_cycles(run), names, rows)
    return _section("Size and accuracy", tag("div", size_accuracy(run), cycles, class_="pair"))


def _about_cycles(run: RunFiles) -> str:
    chosen = "; ◎ was chosen" if run.chosen is not None else ""
    return (
        f"Networks at the end of each cycle, prunable weights that are not zero, and the error of the squeeze{chosen}"
    )


def _epochs(contents: Contents) -> Markup | None:
    run = contents.run
    if run is None or not run.epochs:
        return None
    charts = tag("div", *over_epochs(run), class_="charts")
    return _section("Over the epochs", legend(phases(run)), charts)


# ---------------------------------------------------------------------------------------------------------- the network


def _network(contents: Contents) -> Markup | None:
    layers = contents.layers
    if not layers or contents.sizes is None:
        return None
    others = contents.sizes[0] - sum(layer.params_before for layer in layers) if contents.report is not None else 0
    note = "A bar is as long as the layer has parameters: outlined before, filled now."
    if contents.report is None:
        note += " Layers are in the order of their names."
    return _section("Where the fat was", silhouette(layers), tag("p", note, class_="note"), bars(layers, others))


def _totals(contents: Contents) -> Markup | None:
    report, summary = contents.report, contents.run.summary if contents.run is not None else None
    if report is not None:
        one, other = report.before, report.after
        rows = [
            ("all parameters", one.params, one.params_alive, other.params),
            ("prunable weights", one.weights, one.weights_alive, other.weights),
        ]
        return _section("Sizes", _sizes("Entries of the network, before and now", "not zero before", rows))
    if summary is not None:
        rows = [
            ("all parameters", summary.unpruned_params, -1, summary.deployable_params),  # which are zero was not noted
            ("prunable weights", summary.unpruned_weights, summary.mask_alive, summary.deployable_weights),
        ]
        words = "Entries of the unpruned network, and of the one that came out"
        return _section("Sizes", _sizes(words, "not zero", rows))
    return None


def _sizes(caption: str, alive: str, rows: list[tuple[str, int, int, int]]) -> Markup:
    cells = (
        (
            name,
            Number(before, formats.count(before)),
            Number(living, formats.count(living) if living >= 0 else formats.NONE),
            Number(after, formats.count(after)),
            Number(before / max(after, 1), formats.ratio(before, after)),
        )
        for name, before, living, after in rows
    )
    return table(caption, ("", "before", alive, "now", "smaller"), cells)


# ---------------------------------------------------------------------------------------------------------------- facts


def _speed(contents: Contents) -> Markup | None:
    bench = contents.bench
    if bench is None or not bench.rows:
        return None
    rows = (
        (
            row.name,
            Number(row.batch, formats.count(row.batch)),
            Number(row.seconds_median, formats.duration(row.seconds_median)),
            Number(
                bench.baseline(row).seconds_median / max(row.seconds_median, 1e-12),
                formats.ratio(bench.baseline(row).seconds_median, row.seconds_median),
            ),
            Number(row.seconds_low, f"{formats.duration(row.seconds_low)} to {formats.duration(row.seconds_high)}"),
            Number(row.throughput, f"{row.throughput:,.0f}"),
            Number(row.parameter_bytes, formats.size(row.parameter_bytes)),
        )
        for row in bench.rows
    )
    names = ("network", "batch", "median", "speed", "spread", "samples a second", "parameters")
    return _section("Speed", table(f"Seconds a batch on {bench.where}", names, rows))


def _kept(contents: Contents) -> Markup | None:
    report = contents.report
    if report is None:
        return None
    if not report.kept:
        return _section("What stayed, and why", note="Nothing that looked dead had to stay.")
    most_first = sorted(report.kept, key=lambda kept: -kept.count)
    rows = (
        (breakable(kept.name), Number(kept.count, formats.count(kept.count)), kept.what, kept.reason)
        for kept in most_first
    )
    names = ("layer", "channels", "which", "because")
    return _section("What stayed, and why", table("Channels that looked dead but stayed", names, rows, class_="prose"))


def _checks(contents: Contents) -> Markup | None:
    proof = contents.report.verification if contents.report is not None else None
    if proof is None:
        return None
    rows = ((name, Number(error, formats.power(error))) for name, error in proof.variants)
    variants = table("Old against new in float64", ("comparison", "relative error"), rows)
    note = f"In the model's own dtype the largest difference is {formats.power(proof.max_error_user)}: rounding."
    return _section("How it was checked", variants, note=note)


def _environment(contents: Contents) -> Markup:
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in environment().items()]
    command = tag("pre", tag("code", without_paths(contents.command))) if contents.command else None
    return tag("footer", tag("h2", "Made with"), command, tag("dl", *facts))
