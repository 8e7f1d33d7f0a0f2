"""What `squeeze` would do, without doing it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from .copies import borrowed
from .report import Report, Width
from .squeeze import squeeze
from .unwrap import unwrap

_MOST_REASONS = 3


@dataclass(frozen=True)
class Inspection:
    """The report of a squeeze that did not take place. Prints as a table: each layer, its width, and why it has it."""

    report: Report

    @property
    def widths(self) -> tuple[Width, ...]:
        return self.report.widths

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()

    def __str__(self) -> str:
        console = Console(width=160, record=True, file=io.StringIO())
        for table in self.__rich_tables__():
            console.print(table)
        return console.export_text().rstrip()

    def __rich_tables__(self) -> list[Table | str]:
        rest = self.report.__rich_tables__()[1:]
        shown = {width.name for width in self.widths}
        gone = [layer for layer in self.report.layers if layer.name not in shown]
        table = Table("layer", "outputs", "", "not zero", "writers", "readers", "why", box=box.SIMPLE_HEAD)
        for column in (1, 3, 4, 5):
            table.columns[column].justify = "right"
        for width in self.widths:
            after = f"-> {width.after}" if width.after != width.before else ""
            counts = (str(count) for count in (width.alive, width.writers, width.readers))
            table.add_row(width.name, str(width.before), after, *counts, _why(width))
        for layer in gone:
            table.add_row(layer.name, layer.before, f"-> {layer.after}")
        return [table, *rest]


def _why(width: Width) -> str:
    lines = [f"{count}: {reason}" for reason, count in width.why[:_MOST_REASONS]]
    more = len(width.why) - _MOST_REASONS
    return "\n".join([*lines, *([f"and {more} more reasons"] if more > 0 else [])])


def inspect(
    model: nn.Module,
    example_inputs: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    keep: Sequence[str] = (),
    rules: str = "all",
    compaction: str | None = None,
) -> Inspection:
    """What `squeeze` would make of a model: its sizes, and why each layer is as wide as it is.

    The arguments are those of `squeeze`. The model is left as it is and its weights are not copied; nor is the outcome
    verified, for there is none.
    """
    with borrowed(unwrap(model)) as network:  # which may be changed: only narrow tensors are new
        options: dict[str, Any] = {"keep": keep, "rules": rules, "compaction": compaction}
        return Inspection(squeeze(network, example_inputs, kwargs, inplace=True, verify=False, **options).report)
