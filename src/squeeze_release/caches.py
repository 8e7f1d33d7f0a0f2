"""Key/value caches of language models are left out of the function that is traced and compared.

transformers hands out the keys and values of every head beside the logits, for the next step of `generate`. They are no
output in the sense of this package: with fewer heads there are fewer of them, and the next step wants it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_cache(*models: nn.Module) -> Iterator[None]:
    """Switch `config.use_cache` off while the block lasts."""
    configs = [getattr(module, "config", None) for model in models for module in model.modules()]
    switched = {id(config): config for config in configs if getattr(config, "use_cache", None) is True}
    for config in switched.values():
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in switched.values():
            config.use_cache = True  # type: ignore[union-attr]
