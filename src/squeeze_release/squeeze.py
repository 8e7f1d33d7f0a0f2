"""The exact minimizer: a network full of zeros in, the same function in smaller dense tensors out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from .analyse import RULE_SETS, Analysis, analyse
from .analyse.training import feeds_training_branches
from .compaction import plan_compaction
from .copies import borrow, borrowed, copy_model, emptied
from .errors import InputError, SqueezeError, check_choice
from .follow import Memory, bookkeeping, fit
from .masks import bake_masks, check_finite
from .plain import plan_plain, that_matter
from .plan import Plan
from .record import leave_record, origin_of
from .rehearse import Call
from .report import Report, make_report, outline
from .rewrite import carry_out, rewrite
from .trace import Trace, as_calls, trace
from .trace.sizes import other_paths
from .unwrap import unwrap
from .verify import verify as compare


class Squeezed(NamedTuple):
    """The narrowed model, and the report that says what went, what stayed and why."""

    model: nn.Module
    report: Report


def squeeze(
    model: nn.Module,
    example_inputs: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    inplace: bool = False,
    verify: bool = True,
    keep: Sequence[str] = (),
    rules: str = "all",
    compaction: str | None = None,
) -> Squeezed:
    """Remove every channel, head and block that does not matter, and prove that the function is the same.

    Args:
        model: any module; zeros may be plain, or masks of `torch.nn.utils.prune` or of a parametrization.
        example_inputs: a tensor, a tuple of arguments, or a list of such calls; `kwargs` go with each of them.
        inplace: change `model` itself. By default it is left untouched. With `verify=False` no copy is made either: all
            is planned and tried without weights first, then one tensor after the other is replaced.
        verify: compare old and new in float64 (and raise `VerificationError` if they differ).
        keep: names of modules that must not change their widths.
        rules: "all", or one of the paper's rule sets "A", "AB", "paper".
        compaction: "index" lets a Linear or Conv compute and read less than the width of a stream that cannot shrink:
            it gathers its inputs and places its outputs by index. Fewer parameters, but index operations.

    >>> import torch, squeeze_release as sr
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> with torch.no_grad():
    ...     _ = net[0].weight[2:].zero_()          # six of eight hidden units no longer see the input
    >>> small, report = sr.squeeze(net, torch.randn(1, 4))
    >>> small[0].out_features, report.params_before, report.params_after
    (2, 58, 16)
    """
    started = time.perf_counter()
    check_choice("rules", rules, RULE_SETS, of="squeeze", consequence="nothing was changed")
    check_choice("compaction", compaction, (None, "index"), of="squeeze", consequence="nothing was changed")
    source = unwrap(model)
    keep = _check_keep(source, [keep] if isinstance(keep, str) else keep)
    frugal = inplace and not verify
    masked = borrow(source) if frugal else copy_model(source)
    bake_masks(masked)
    check_finite(masked)

    calls, before, origin = as_calls(example_inputs, kwargs), outline(masked), origin_of(masked)
    calls += [call for call in other_paths(masked, calls) if _exports(masked, call)]  # code may pad other sizes
    small, plans, memory = masked, [], Memory()
    # The same steps in float64. Constants are read from it: in `small`, what earlier steps folded is rounded already.
    exact = copy_model(masked).double() if verify else None
    first = traces = _traces(small, calls)  # 1. trace
    while True:
        unbound = not memory.tied
        facts = analyse(small, traces, rules, keep, exact)  # 2. constants, forward
        facts.pin_outputs(feeds_training_branches(small, calls[0], traces), "feeds a branch that runs in training only")
        fitted = fit(facts, calls, memory)  # 3. liveness, backward  4. plan, and see that the code follows it
        step = fitted.plan if fitted.saved > 0 else _other_step(facts, calls, rules, compaction)
        if step.empty:
            if unbound:
                break
            memory = Memory(memory.liked)  # what wider layers had to tie may be tied in another way in those left
            continue
        # What is left may show more: a block may be dead once a channel is gone. The second look mostly finds nothing.
        traces = fitted.traces if fitted.saved > 0 else _traces(rewrite(borrow(small), step), calls)
        plans.append(step)
        if frugal:  # 5. rewrite the modules
            emptied(masked)  # which gives back what it borrowed
            small = carry_out([step], source)
        else:
            small = rewrite(borrow(small), step)
        exact = rewrite(exact, step) if exact is not None else None
    if plans:
        bookkeeping.update(small, first, traces, calls)
    proof = compare(masked, small, calls, exact=exact) if verify else None  # 6. old against new
    report = make_report(facts, fitted, plans, before, small, proof, time.perf_counter() - started)
    if inplace:
        small = carry_out([] if frugal else plans, source)
        if plans and not frugal:
            bookkeeping.update(small, first, traces, calls)
    leave_record(small, origin)  # for `save`
    return Squeezed(small, report)


def _traces(model: nn.Module, calls: list[Call]) -> list[Trace]:
    """Of a copy, for a forward may leave things on its modules."""
    with borrowed(model) as copy:
        return [trace(copy, call) for call in calls]


def _exports(model: nn.Module, call: Call) -> bool:
    try:
        return bool(_traces(model, [call]))
    except SqueezeError:
        return False


def _other_step(facts: Analysis, calls: list[Call], rules: str, compaction: str | None) -> Plan:
    """Where no channel goes as things are: computed weights become plain, so that some can; layers gather and place."""
    step = plan_plain(facts)
    if not step.empty:
        with borrowed(facts.model) as copy:
            model = rewrite(copy, step)
            found = fit(analyse(model, _traces(model, calls), rules, facts.keep), calls, Memory())
        step = that_matter(step, found.plan if found.saved > 0 else Plan())
    return plan_compaction(facts) if step.empty and compaction else step


def _check_keep(model: nn.Module, keep: Sequence[str]) -> Sequence[str]:
    names = {name for name, _ in model.named_modules()}
    for name in keep:
        if name not in names:
            raise InputError(
                f"keep names no module: {name!r}",
                where=type(model).__name__,
                consequence="nothing was changed",
                remedy="use the dotted names of model.named_modules()",
            )
    return keep
