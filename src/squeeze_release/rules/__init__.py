"""One dict of rules over aten ops. Unknown means keep.

A rule is three small functions: `forward` says what is known of the output, `need` which inputs the living outputs
need, `absorb` how the parameters change when channels go. Its docstring states its algebra.
"""

from . import (
    affine,
    attention,
    carriers,
    create,
    elementwise,
    groupnorm,
    index,
    joined,
    matmul,
    norm,
    pool,
    shape,
    total,
    window,
)
from .base import RULES, UNKNOWN, Op, Rule, flat, rule

__all__ = [
    "RULES",
    "UNKNOWN",
    "Op",
    "Rule",
    "affine",
    "attention",
    "carriers",
    "create",
    "elementwise",
    "flat",
    "groupnorm",
    "index",
    "joined",
    "matmul",
    "norm",
    "pool",
    "rule",
    "shape",
    "total",
    "window",
]
