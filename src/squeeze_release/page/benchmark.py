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
    rows: tuple[Timing, ...]

    def baseline(self, row: Timing) -> Timing:
        return next(other for other in self.rows if other.batch == row.batch)

    @property
    def headline(self) -> tuple[Timing, Timing] | None:
        """The network as it was, and the last one measured against it."""
        pairs = [(self.baseline(row), row) for row in self.rows if self.baseline(row) is not row]
        return pairs[-1] if pairs else None


def read_bench(bench: Any) -> Measured:
    try:
        found = bench.to_dict()
        rows = tuple(Timing(**{name: row[name] for name in Timing.__dataclass_fields__}) for row in found["rows"])
        threads = found["threads"]
        return Measured(f"{found['device']}, {found['dtype']}, {threads} thread{'s' * (threads != 1)}", rows)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"bench has no measurement: {type(error).__name__}: {error}",
            where="write_page(..., bench=)",
            consequence="no page was written",
            remedy="give what squeeze_release.bench returns",
        ) from error
