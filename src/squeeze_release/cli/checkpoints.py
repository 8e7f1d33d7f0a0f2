"""CHECKPOINT: the weights of a full-size model, from a safetensors file or a torch file that holds tensors alone."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import InputError
from ..masks import apply_mask
from ..store import load
from ..store.archive import is_ours

HELP = "safetensors, or a torch file that holds tensors alone; also one that `squeeze` wrote"
_NESTED = ("state_dict", "model", "model_state_dict")
_MOST_NAMES = 8


def with_weights(model: nn.Module, path: str) -> nn.Module:
    """The model with the weights of a file; masks of torch.nn.utils.prune become zeros.

    A file that `save` wrote gives the squeezed network in it.
    """
    if not os.path.isfile(path):
        raise _unreadable("there is no such file", path, "name a safetensors file or a torch file")
    if is_ours(path):
        return load(model, path)
    state = _unmasked(_cleaned(_read(path), path))
    _check(model, state, path)
    model.load_state_dict(state, strict=False)
    return model


def _read(path: str) -> Mapping[str, Any]:
    if path.endswith(".safetensors"):
        try:
            return load_file(path)
        except safetensors.SafetensorError as error:
            raise _unreadable(f"not a whole safetensors file: {error}", path, "write it again") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        remedy = "where it was made, write torch.save(model.state_dict(), PATH), or a safetensors file"
        what = "it holds more than tensors, or is damaged: torch.load(..., weights_only=True) refuses it"
        raise _unreadable(what, path, remedy) from error
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise _unreadable(f"not a torch file: {type(error).__name__}: {first}", path, "write it again") from error
    for key in _NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise _unreadable(f"it holds a {type(found).__name__}, not a state dict", path, "save model.state_dict()")
    return found


def _cleaned(found: Mapping[str, Any], path: str) -> dict[str, Tensor]:
    """Without what torch.compile and DistributedDataParallel put in front of names."""
    other = [str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if other or not found:
        what = f"no tensors: {_list(other)}" if other else "no tensors"
        raise _unreadable(what, path, "save model.state_dict(), plain or as 'state_dict' or 'model' in a dict")
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    while all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def _unmasked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weight_orig` and `weight_mask` become `weight`."""
    result = dict(state)
    for name in [name.removesuffix("_orig") for name in state if name.endswith("_orig")]:
        if f"{name}_mask" in state:
            result[name] = apply_mask(result.pop(f"{name}_orig"), result.pop(f"{name}_mask"), name)
    return result


def _check(model: nn.Module, state: dict[str, Tensor], path: str) -> None:
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in state if name in own}  # a tied weight is stored under one of its names
    missing = [name for name, tensor in own.items() if name not in state and id(tensor) not in given]
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # old files have none
    unknown = [name for name in state if name not in own]
    shapes = [
        f"{name} is {_shape(tensor)}, in the model {_shape(own[name])}"
        for name, tensor in state.items()
        if isinstance(own.get(name), Tensor) and own[name].shape != tensor.shape
    ]
    wrong = {"missing": missing, "unexpected": unknown, "of another shape": shapes}
    if any(wrong.values()):
        raise InputError(
            "the checkpoint is not one of this model",
            where="".join(
                f"\n    {len(names)} {what}: {_list(names)}" for what, names in wrong.items() if names
            ).strip(),
            consequence=f"nothing was loaded from {path}",
            remedy="name the model that the checkpoint is of, with its arguments: timm:NAME?num_classes=10",
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _list(names: list[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _unreadable(what: str, path: str, remedy: str) -> InputError:
    consequence = "nothing was loaded, and nothing of the file was executed"
    return InputError(what, where=f"CHECKPOINT {path}", consequence=consequence, remedy=remedy)
