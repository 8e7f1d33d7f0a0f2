"""What a rule is, the one dict of rules, and the rule for what is not understood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx

from ..facts import Fact, nothing, varying
from ..labels import Live

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan
    from ..trace import Trace
    from .carriers import Request

Facts = Fact | list[Any] | None


@dataclass(eq=False)
class Op:
    """One call in the traced graph, with the facts of its arguments under their schema names."""

    node: fx.Node
    trace: Trace
    given: dict[str, Any]
    out: Facts = None
    memo: dict[str, Any] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)  # a rule's name for an argument -> the schema's

    @property
    def name(self) -> str:
        return str(self.node.target)

    @property
    def module(self) -> str:
        """Dotted path of the innermost module whose forward made this call."""
        return self.trace.module_of(self.node)

    @property
    def where(self) -> str:
        return f"{self.module or 'the forward of the model'} ({self.name.removesuffix('.default')})"

    def param(self, argument: str) -> str | None:
        """Name of the parameter or buffer that was passed as it is, without any op in between."""
        return self.trace.param_of(self.node, self.alias.get(argument, argument))

    def facts(self) -> Iterator[Fact]:
        yield from flat(list(self.given.values()))

    def outputs(self) -> Iterator[Fact]:
        yield from flat(self.out)


def flat(tree: Any) -> Iterator[Fact]:
    if isinstance(tree, Fact):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flat(item)


class Rule:
    """The rule for what is not understood: knows nothing, needs everything, fixes the widths of what it touches.

    Exact: always, for nothing changes here.
    Keeps: every channel of every input. What reads the output, whose widths are fixed, may lose outputs of its own.
    """

    reason = "no rule understands this op"

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        """Labels and constants of the output, from those of the inputs."""
        for fact in op.facts():
            for layer in fact.layers:
                ctx.pin(layer, op, self.reason)
        return blank(op)

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        """Mark the input channels that the living output channels need."""

    def carriers(self, op: Op, ctx: Analysis, live: Live) -> Iterator[Request]:
        """Ask that one of several channels stays, on behalf of the others."""
        yield from ()

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        """Fold into the parameters what goes."""

    def cuts(self, op: Op, ctx: Analysis) -> bool:
        """Whether the op can be rewritten so that it no longer depends on its input: its output is constant."""
        return False


def blank(op: Op) -> Facts:
    """Outputs of which nothing is known."""

    def empty(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return nothing(tuple(int(s) for s in value.shape))
        if isinstance(value, (list, tuple)):
            return [empty(v) for v in value]
        return None

    result: Facts = empty(op.node.meta.get("val"))
    return result


RULES: dict[Any, Rule] = {}
UNKNOWN = Rule()

R = TypeVar("R", bound=type[Rule])


def rule(*targets: str) -> Callable[[R], R]:
    """Register a rule for aten ops by name ("linear" means every overload; "add.Tensor" one of them)."""

    def register(cls: R) -> R:
        instance = cls()
        for target in targets:
            for overload in overloads(target):
                RULES[overload] = instance
        return cls

    return register


def overloads(target: str) -> list[Any]:
    namespace, _, target = target.rpartition("::")
    packet_name, _, overload = target.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    if packet is None:  # an op that this version of torch does not have
        return []
    return [getattr(packet, overload)] if overload else [getattr(packet, name) for name in packet.overloads()]


def contracted(op: Op, ctx: Analysis, fact: Fact, dim: int) -> Tensor | None:
    """Labels along a dimension that the op sums over; None where the extent is fixed."""
    dim %= len(fact.shape)
    for layer in fact.along(dim):
        if varying(layer) == (dim,):
            return layer.movedim(dim, 0).reshape(layer.size(dim), -1)[:, 0]
        ctx.pin(layer, op, "reads channels that are spread over several dimensions")
    return None


def passed_on(fact: Fact, dims: tuple[int, ...]) -> list[Tensor]:
    """The layers that vary along none of these dimensions."""
    dims = tuple(d % len(fact.shape) for d in dims)
    return [layer for layer in fact.layers if not set(varying(layer)) & set(dims)]
