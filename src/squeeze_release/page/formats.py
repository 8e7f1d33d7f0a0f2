"""Numbers as people read them."""

from __future__ import annotations

import math

TIMES, NONE = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(number: float) -> str:
    """193226 -> 193,226"""
    return f"{number:,.0f}"


def compact(number: float) -> str:
    """193226 -> 193k: for axes."""
    return _with_unit(number, ((1e9, "G"), (1e6, "M"), (1e3, "k")))


def size(number: float) -> str:
    """Bytes: 772904 -> 773 kB"""
    return _with_unit(number, ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1, " B")))


def duration(seconds: float) -> str:
    """0.0123 -> 12.3 ms"""
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return _with_unit(seconds, ((1, " s"), (1e-3, " ms"), (1e-6, " µs")))


def ratio(before: float, after: float) -> str:
    """193226 and 1937 -> 99.8 times"""
    if not (before > 0 and after > 0 and math.isfinite(before / after)):
        return NONE
    times = before / after
    if times >= 99.95:
        return f"{times:,.0f}{TIMES}"
    return f"{times:.{1 if times >= 9.995 else 2}f}{TIMES}"


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}%" if math.isfinite(share) else NONE


def power(number: float) -> str:
    """9.36e-16 -> 9.4 times 10⁻¹⁶; 1e-10 -> 10⁻¹⁰"""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    if 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    factor = "" if mantissa == "1.0" else mantissa + TIMES
    return f"{factor}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def _with_unit(number: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next(((scale, unit) for scale, unit in units if abs(number) >= 0.9995 * scale), (1.0, ""))
    if not unit and units[-1][0] < 1:  # less than the smallest unit
        scale, unit = units[-1]
    value = number / scale
    return f"{value:.0f}{unit}" if abs(value) >= 99.95 or value == round(value) else f"{value:.3g}{unit}"
