"""The cycle in other people's loops: one callback, for Lightning's `fit` or for the `Trainer` of transformers.

guest.py       read first: what happens before, in and after an epoch, whoever's epoch it is
optimizer.py   an optimizer follows the network to its new parameters
resume.py      what goes into a checkpoint, and the narrow network out of it
checks.py      what cannot work is said before the first epoch
lightning.py, trainer.py

Neither lightning nor transformers is imported before its callback is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lightning import SqueezeReleaseCallback
    from .trainer import SqueezeReleaseTrainerCallback

__all__ = ["SqueezeReleaseCallback", "SqueezeReleaseTrainerCallback"]


def __getattr__(name: str) -> Any:
    if name == "SqueezeReleaseCallback":
        from .lightning import SqueezeReleaseCallback

        return SqueezeReleaseCallback
    if name == "SqueezeReleaseTrainerCallback":
        from .trainer import SqueezeReleaseTrainerCallback

        return SqueezeReleaseTrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
