"""`make fuzz N=2000`: random networks, random masks, no wrong result. Every failure is printed and shrunk."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings

import squeeze_release as sr

sys.path.insert(0, str(Path(__file__).parent))

from check import assert_same
from networks import Case, cases

tally: Counter[str] = Counter()


def attack(case: Case) -> None:
    """Squeeze it; the function must be the same, and a second squeeze must find nothing."""
    small, report = sr.squeeze(case.model, case.inputs)
    assert_same(case.model, small, (case.inputs,), {})
    second = sr.squeeze(small, case.inputs, verify=False).report
    assert second.params_after == report.params_after, f"not a fixed point:\n{report}\n{second}"
    tally["networks"] += 1
    tally["narrowed"] += report.params_after < report.params_before
    tally["parameters before"] += report.params_before
    tally["parameters after"] += report.params_after


def main(count: int) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )(given(cases())(attack))
    run()
    print(f"{dict(tally)} in {time.perf_counter() - started:.0f} s: no wrong result")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
