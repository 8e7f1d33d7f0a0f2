"""All that a page is made from."""

from __future__ import annotations

from dataclasses import dataclass

from ..report import Layer, Report
from .benchmark import Measured
from .run_files import RunFiles


@dataclass(frozen=True)
class Contents:
    """All that a page is made from. Where there is both a report and a run, the report says what became how small."""

    report: Report | None
    run: RunFiles | None
    bench: Measured | None
    command: str

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Parameters before and now."""
        if self.report is not None:
            return self.report.params_before, self.report.params_after
        if self.run is not None and self.run.summary is not None:
            return self.run.summary.unpruned_params, self.run.summary.deployable_params
        if self.run is not None and self.run.points:
            return self.run.points[0].deployable_params, self.run.points[-1].deployable_params
        return None

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.report.layers if self.report is not None else self.run.layers if self.run is not None else ()
