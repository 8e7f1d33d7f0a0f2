"""How many weights are left, as a function of the progress p from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable

Schedule = Callable[[float], float]


def cubic(p: float, *, first: float = 1.0, last: float = 0.002) -> float:
    """r(p) = last + (first - last) (1 - p)^3: most go early, while there is much to choose from (Zhu and Gupta).

    >>> cubic(0.0), cubic(0.5), cubic(1.0)
    (1.0, 0.12675, 0.002)
    """
    return last + (first - last) * (1 - p) ** 3


def linear(p: float, *, first: float = 1.0, last: float = 0.002) -> float:
    """Equally many go at every step."""
    return last + (first - last) * (1 - p)


def constant(p: float, *, first: float = 1.0, last: float = 0.002) -> float:
    """All go at the first step, or, read the other way, one shot."""
    return last if p > 0 else first
