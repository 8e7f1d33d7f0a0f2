"""What models keep from one call to the next is left out of the function that is traced and compared.

transformers hands out the keys and values of every head beside the logits, for the next step of `generate`. They are no
output in the sense of this package: with fewer heads there are fewer of them, and the next step wants it so. timm keeps
what its attentions look up in a table of biases in a dict on the module, as long as it is in eval mode: a trace that
found it there would show a tensor of its own where it should show the table.
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


@contextmanager
def nothing_kept(model: nn.Module) -> Iterator[None]:
    """Take out of dicts on modules what the block puts there."""
    public = [(k, v) for module in model.modules() for k, v in vars(module).items() if not k.startswith("_")]
    before = [(held, dict(held)) for _, held in public if type(held) is dict]
    try:
        yield
    finally:
        for held, contents in before:
            if held.keys() != contents.keys():
                held.clear()
                held.update(contents)


def let_go(model: nn.Module) -> None:
    """What modules keep for eval mode was computed from parameters that are others now.

    Their own `train` lets go of it when their mode is set, as it must for them to be trained.
    """
    for own in [module for module in model.modules() if type(module).train is not nn.Module.train]:
        modes = [(module, module.training) for module in own.modules()]
        own.train(own.training)
        for module, training in modes:
            module.training = training
