"""What a measurement says: `bench` is anything whose `to_dict` has rows of names, batches and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InputError


@dataclass(frozen=True)
class Timing:
    name: str
    batch: int
    seconds_median: float
    seconds_low: float
    seconds_high: float
    throughput: float
    parameter_bytes: int


@dataclass(frozen=True)
class Measured:
    """The first row of every batch is what the others are compared with: the network as it was."""

    where: str
    batch: int  # the one that the headline is about
    rows: tuple[Timing, ...]

    def baseline(self, row: Timing) -> Timing:
        return next(other for other in self.rows if other.batch == row.batch)

    @property
    def headline(self) -> tuple[Timing, Timing] | None:
        """The network as it was, and the last one measured against it."""
        pairs = [(self.baseline(row), row) for row in self.rows if row.batch == self.batch][1:]
        return pairs[-1] if pairs else None


def read_bench(bench: Any) -> Measured:
    try:
        found = bench.to_dict()
        rows = tuple(Timing(**{name: row[name] for name in Timing.__dataclass_fields__}) for row in found["rows"])
        device, threads = str(found["device"]), found["threads"]
        on = f", {threads} thread{'s' * (threads != 1)}" if device == "cpu" else ""
        return Measured(f"{device}, {found['dtype']}{on}", found["batch"], rows)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"bench has no measurement: {type(error).__name__}: {error}",
            where="write_page(..., bench=)",
            consequence="no page was written",
            remedy="give what squeeze_release.bench returns",
        ) from error
