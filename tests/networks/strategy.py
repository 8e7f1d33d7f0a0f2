"""The random networks as a Hypothesis strategy, which shrinks what fails. Apart, so that `fuzz.py` runs without it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .families import Case, case_from


@st.composite
def cases(draw: Any) -> Case:
    return case_from(lambda options: draw(st.sampled_from(options)), draw(st.integers(0, 2**16)))
