"""--input: `1x3x224x224`, `1x128:int64`, `attention_mask=1x128:bool`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from ..rehearse import Call

HELP = (
    "shape of an example input, 1x3x224x224; with its dtype, 1x128:int64 (drawn below the size of the vocabulary) or "
    "1x128:int64:2 (below 2), 1x128:bool (all true); NAME=... for keywords. Once for each input"
)
_FORM = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>[a-z]+\d*)(?::(?P<below>\d+))?)?")
_DTYPES = {
    name: getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
}
FLOATS = ("float64", "float32", "float16", "bfloat16")


class Spec(NamedTuple):
    text: str
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None is that of the model
    below: int | None


def parse(texts: list[str]) -> list[Spec]:
    found = [_parse(text) for text in texts]
    if not found:
        raise _wrong("there is none; give the shape of an example input")
    names = [spec.name for spec in found if spec.name]
    if len({*names}) < len(names):
        raise _wrong(f"{names[-1]!r} is given twice")
    return found


def _parse(text: str) -> Spec:
    form = _FORM.fullmatch(text)
    if form is None or form["dtype"] not in (None, *_DTYPES):
        raise _wrong(f"{text!r} is no input; use 1x3x224x224, 1x128:int64 or NAME=1x128:bool ({', '.join(_DTYPES)})")
    dtype = None if form["dtype"] is None else _DTYPES[form["dtype"]]
    if form["below"] is not None and (dtype is None or dtype.is_floating_point or form["below"] == "0"):
        raise _wrong(f"{text!r}: only integers are drawn below a number, and that is 1 at least")
    shape = tuple(map(int, form["shape"].split("x")))
    if 0 in shape:
        raise _wrong(f"{text!r} has nothing in it; sizes are 1 at least")
    return Spec(text, form["name"], shape, dtype, None if form["below"] is None else int(form["below"]))


def draw(specs: list[Spec], model: nn.Module, dtype: torch.dtype) -> Call:
    """Random inputs, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(spec.name, _draw(spec, model, dtype, generator)) for spec in specs]
    kwargs: dict[str, Any] = {name: tensor for name, tensor in drawn if name}
    return tuple(tensor for name, tensor in drawn if not name), kwargs


def _draw(spec: Spec, model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wanted = spec.dtype or dtype
    if wanted is torch.bool:
        return torch.ones(spec.shape, dtype=wanted)
    if wanted.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(wanted)
    below = spec.below or _vocabulary(model)
    if below is None:
        raise _wrong(
            f"{spec.text!r}: the model has no embedding that says how large the numbers may be; add it, as in "
            f"{spec.text}:1000"
        )
    return torch.randint(below, spec.shape, generator=generator).to(wanted)


def _vocabulary(model: nn.Module) -> int | None:
    """The config's, or the size of the first embedding."""
    sizes = [getattr(getattr(model, "config", None), "vocab_size", None)]
    sizes += [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return next((size for size in sizes if isinstance(size, int)), None)


def _wrong(what: str) -> typer.BadParameter:
    return typer.BadParameter(what, param_hint="--input")
