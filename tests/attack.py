"""Everything that is asked of a squeeze of one random network, and what failed when it did not hold."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import torch
from check import TOLERANCE, assert_same, error, tensors
from networks import Case
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import squeeze_release as sr

KINDS = ("wrong result", "refused by verification", "crash", "not a fixed point", "in place differs")


class Failure(AssertionError):
    """One of `KINDS`, with the details."""

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(f"{kind}: {details}")
        self.kind = kind


def attack(case: Case, options: dict[str, Any] | None = None) -> Counter[str]:
    """Squeeze it; the function must be the same, and a second squeeze must find nothing."""
    options = options or {}
    squeezed = _squeeze(case, **options)
    _compare(case.model, squeezed.model, case)
    again = _squeeze(Case(squeezed.model, case.inputs, case.story), verify=False, **options)
    if again.report.params_after != squeezed.report.params_after:
        raise Failure("not a fixed point", f"{squeezed.report}\n{again.report}")
    _compare(case.model, again.model, case)
    report = squeezed.report
    return Counter(
        {
            "networks": 1,
            "narrowed": int(report.params_after < report.params_before),
            "parameters before": report.params_before,
            "parameters after": report.params_after,
        }
    )


def attack_in_place(case: Case) -> None:
    """Without a copy it becomes what a copy would become."""
    apart = _squeeze(case, verify=False)
    there = Case(copy.deepcopy(case.model), case.inputs, case.story)
    together = _squeeze(there, inplace=True, verify=False)
    if together.model is not there.model:
        raise Failure("in place differs", "another module came back")
    if together.report.params_after != apart.report.params_after:
        raise Failure("in place differs", f"{together.report}\n{apart.report}")
    _compare(case.model, together.model, case)


def attack_single(case: Case) -> None:
    """In float32: about as far from the exact numbers as the original is."""
    single = Case(copy.deepcopy(case.model).float(), pytree.tree_map(_single, case.inputs), case.story)
    small = _squeeze(single).model
    with torch.no_grad():
        for call, rounded in zip(case.calls, single.calls, strict=True):
            exact, was, now = (
                tensors(net(*args)) for net, args in ((case.model, call), (single.model, rounded), (small, rounded))
            )
            for a, b, c in zip(exact, was, now, strict=True):
                drift, old = error(a, c.double()), error(a, b.double())
                if not drift <= 1e-4 + 30 * old:
                    raise Failure("wrong result", f"float32 is {drift:.1e} off, and was {old:.1e} off")


def attack_all(case: Case, seed: int) -> Counter[str]:
    """The plain squeeze always, the rest now and then, as the seed says."""
    if only_rounding(case):
        return Counter({"output is rounding": 1})
    pick = random.Random(seed + 1)
    options: dict[str, Any] = {}
    if pick.random() < 0.15:
        options["compaction"] = "index"
    if pick.random() < 0.1:
        options["rules"] = pick.choice(["A", "AB", "paper"])
    tally = attack(case, options)
    if pick.random() < 0.15:
        attack_in_place(case)
    if pick.random() < 0.1:
        attack_single(case)
    return tally


@torch.no_grad()
def only_rounding(case: Case) -> bool:
    """Whether an output is 0 but for rounding, as the mean of a normalised channel is: nothing to compare with."""
    sizes = [float(out.abs().max()) for call in case.calls for out in tensors(case.model(*call))]
    return any(0 < size < 1e-12 for size in sizes)


def _squeeze(case: Case, **options: Any) -> sr.Squeezed:
    try:
        return sr.squeeze(case.model, case.inputs, **options)
    except sr.VerificationError as cause:
        raise Failure("refused by verification", str(cause)) from cause
    except sr.SqueezeError:
        raise
    except Exception as cause:
        raise Failure("crash", f"{type(cause).__name__}: {cause}") from cause


def _compare(old: nn.Module, new: nn.Module, case: Case) -> None:
    try:
        for call in case.calls:
            assert_same(old, new, call, {})
            assert_same(old, new, pytree.tree_map(_another, call), {})
    except AssertionError as cause:
        raise Failure("wrong result", str(cause) or f"more than {TOLERANCE} apart") from cause
    except Exception as cause:
        raise Failure("crash", f"the result does not run: {type(cause).__name__}: {cause}") from cause


def _another(value: Any) -> Any:
    """A bigger batch of other numbers, other tokens, another mask."""
    if not isinstance(value, Tensor):
        return value
    shape = (len(value) + 1, *value.shape[1:])
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype)
    if value.dtype == torch.bool:
        return (torch.rand(shape) < 0.5) | torch.eye(shape[-1], dtype=torch.bool)
    return torch.randint(int(value.max()) + 1, shape)


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
