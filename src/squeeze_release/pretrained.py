"""`save_pretrained` of a narrowed model would write weights with a config that builds the wide one: an error says so.

The method is hidden by a function in the module's own attributes, which copies and pickles as any other attribute;
class, state dict and forward are untouched. `del model.save_pretrained` brings the method back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from .errors import StoreError

if TYPE_CHECKING:
    from .record import Structure

_METHOD = "save_pretrained"


def guard_save_pretrained(model: nn.Module, full: Structure) -> None:
    """On every module that has such a method, and a part of which is not what its config says."""
    having = {path: m for path, m in model.named_modules() if callable(getattr(type(m), _METHOD, None))}
    changed = {*_changed(model, full)} if having else set()
    for path, module in having.items():
        if any(_inside(name, path) for name in changed):
            vars(module)[_METHOD] = refuse_save_pretrained


def _changed(model: nn.Module, full: Structure) -> Iterator[str]:
    """Names of parameters and modules that are others than before the first squeeze, or were not there."""
    shapes = {name: [*p.shape] for name, p in model.named_parameters(remove_duplicate=False)}
    kinds = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    yield from (name for name in shapes | full["parameters"] if shapes.get(name) != full["parameters"].get(name))
    yield from (path for path in kinds | full["modules"] if kinds.get(path) != full["modules"].get(path))


def _inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def refuse_save_pretrained(*_: Any, **__: Any) -> NoReturn:
    raise StoreError(
        "save_pretrained does not fit a squeezed model: its config says the widths from before",
        where="model.save_pretrained, which the checkpoints of a Trainer are made by too",
        consequence="from_pretrained would build the wide model, and fail; nothing was saved",
        remedy="squeeze_release.save(model, path), and squeeze_release.load(Model(config), path) to bring it back; "
        "in a Trainer, save_strategy='no'",
    )
