"""Every error this package raises on purpose.

    SqueezeError
    ├── InputError          what was given does not fit: example inputs, an argument, a file, a folder
    ├── ModelError          the model is wrapped, lazy or parametrized in a way that cannot be rewritten
    ├── ExportError         torch.export cannot trace the model
    ├── WeightError         a parameter is NaN or infinite
    ├── MaskError           a pruning mask does not fit its weight
    ├── VerificationError   old and new network differ: a bug in a rule, and the caller's model is untouched
    ├── StoreError          a file is damaged, or of another model; or a model cannot be saved
    └── RunStopped          a run has used up its time; it can be resumed

Each message says what happened, where, what it means for the caller, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable


class SqueezeError(Exception):
    """Base of all errors raised on purpose; prints as four short lines."""

    def __init__(self, what: str, *, where: str, consequence: str, remedy: str) -> None:
        self.what, self.where, self.consequence, self.remedy = what, where, consequence, remedy
        super().__init__(f"{what}\n  where:       {where}\n  consequence: {consequence}\n  remedy:      {remedy}")


class InputError(SqueezeError):
    """What was given does not fit: example inputs, an argument, a file, a folder."""

    module: str = ""  # dotted path of the innermost module that failed
    progress: int = 0  # modules that ran to their end before that


class ModelError(SqueezeError):
    """The model is wrapped, lazy or parametrized in a way that cannot be rewritten."""


class ExportError(SqueezeError):
    """torch.export cannot trace the model."""


class WeightError(SqueezeError):
    """A parameter or buffer holds NaN or infinity."""


class MaskError(SqueezeError):
    """A pruning mask does not fit its weight."""


class VerificationError(SqueezeError):
    """The rewritten network does not compute what the original computes."""


class StoreError(SqueezeError):
    """A file is damaged, of another format or of another model; or a model is not one that can be saved."""


class RunStopped(SqueezeError):
    """A run has used up the time it was given. All of it is on disk, and it can be resumed."""


def check_choice(name: str, value: object, allowed: Iterable[object], *, of: str, consequence: str) -> None:
    """Raise an `InputError` unless the argument `name` of `of` is one of a few values."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise InputError(
            f"{name}={value!r} is not a known value",
            where=f"{of}(..., {name}=)",
            consequence=consequence,
            remedy=f"use one of {', '.join(map(repr, allowed))}",
        )
