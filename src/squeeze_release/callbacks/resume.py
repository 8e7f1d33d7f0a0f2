"""What goes into a loop's checkpoint, and the narrow network out of it.

A checkpoint of the loop has narrow weights, which a full-size model does not take. Beside them goes the file that
`save` wrote when the network got its present widths: from it the full-size model is narrowed before the weights come.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..cycle import Config
from ..cycle.directory import check_same, like, under, with_points
from ..errors import InputError
from ..store import load
from ..store.archive import opened
from ..store.rebuild import rebuild
from .guest import Guest

FILE = "squeeze_release.safetensors"


class Resumed(NamedTuple):
    """A run as it was when a checkpoint was written: plain data as JSON, and tensors."""

    about: str
    tensors: dict[str, Tensor]


def pack(guest: Guest, **more: Any) -> Resumed:
    weights, masks = guest.before or ({}, {})
    named = {
        "masks": guest.masks.state(),
        "scores": guest.scored or {},
        "sums": guest.worth.sums,
        "before": weights,
        "before_masks": masks,
    }
    tensors = {f"{part}.{name}": tensor for part, each in named.items() for name, tensor in each.items()}
    if guest.state.structure:
        file = (guest.directory.path / guest.state.structure).read_bytes()
        tensors["network"] = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    example = None
    if guest.knows_inputs and (guest.state.phase == "squeeze" or guest.config.grain == "channel"):
        # Both come before the next batch, from which inputs could be taken.
        example, inputs = _portable((guest.example_inputs, guest.kwargs))
        tensors |= inputs
    metrics = guest.directory.path / "metrics.jsonl"
    about = {
        "config": asdict(guest.config),
        "state": asdict(guest.state),
        "metrics": metrics.stat().st_size if metrics.exists() else 0,
        "steps": guest.steps,
        "updating": guest.before is not None,
        "example": example,
        **more,
    }
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return Resumed(json.dumps(about), whole)


def _portable(call: Any) -> tuple[list[Any] | None, dict[str, Tensor]]:
    """How it is nested and its plain values, for JSON, and its tensors; nothing if there are values of another kind."""
    leaves, tree = pytree.tree_flatten(call)
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if not all(other is None or type(other) in (bool, int, float, str) for other in others):
        return None, {}
    try:
        spec = pytree.treespec_dumps(tree)
    except NotImplementedError:  # nested in classes of the user's own
        return None, {}
    return [spec, others], {f"example.{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def unpack(guest: Guest, resumed: Resumed) -> None:
    """Put a guest on the narrow network, whose weights are loaded, where it was."""
    about, tensors = json.loads(resumed.about), resumed.tensors
    state, masks = with_points(about["state"]), under("masks.", tensors)
    if about["example"] and not guest.knows_inputs:
        spec, others = about["example"]
        leaves = [tensors.get(f"example.{i}", other) for i, other in enumerate(others)]
        guest.take_inputs(pytree.tree_unflatten(leaves, pytree.treespec_loads(spec)))
    guest.state, guest.steps = state, about["steps"]
    if masks:
        if guest.config.grain == "channel":
            guest.check_inputs("without them no channel is known")
        guest.masks.load_state(masks)
    guest.scored = like(guest.model, under("scores.", tensors)) or None
    guest.worth.sums.update(like(guest.model, under("sums.", tensors)))
    device = next(guest.model.parameters()).device
    if about["updating"]:
        parts = (under(part, tensors) for part in ("before.", "before_masks."))
        old_weights, old_masks = ({name: tensor.to(device) for name, tensor in part.items()} for part in parts)
        guest.before = old_weights, old_masks
    if state.structure:
        (guest.directory.path / state.structure).write_bytes(_bytes(tensors["network"]))
    metrics = guest.directory.path / "metrics.jsonl"
    if metrics.exists():
        os.truncate(metrics, min(about["metrics"], metrics.stat().st_size))


def check_config_of(resumed: Resumed, config: Config, where: str) -> None:
    check_same(json.loads(resumed.about)["config"], json.loads(json.dumps(asdict(config))), "the checkpoint", where)


def narrow(model: nn.Module, resumed: Resumed) -> None:
    """Give a full-size model the widths of the checkpoint, in place."""
    network = resumed.tensors.get("network")
    if network is None:
        return  # never squeezed
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        file.write_bytes(_bytes(network))
        load(model, file)  # a copy: what does not fit is an error while the model is whole
        with opened(file) as archive:
            small = rebuild(model, archive)
    if small is not model:  # a model that is itself a single layer
        model.__class__, model.__dict__ = small.__class__, small.__dict__


def write(resumed: Resumed, folder: str | Path) -> None:
    save_file(resumed.tensors, Path(folder) / FILE, {"about": resumed.about})


def read(folder: str | Path) -> Resumed:
    file = Path(folder) / FILE
    try:
        with safe_open(file, "pt") as opened_file:
            tensors = {name: opened_file.get_tensor(name) for name in opened_file.keys()}  # noqa: SIM118
            return Resumed(opened_file.metadata()["about"], tensors)
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        raise InputError(
            f"{FILE} cannot be read: {type(error).__name__}: {error}",
            where=str(folder),
            consequence="the run was not resumed; the model is as it was",
            remedy="give the folder of a checkpoint that was written while the callback ran",
        ) from error


def from_state(state: Mapping[str, Any]) -> Resumed | None:
    return Resumed(state["about"], state["tensors"]) if state.get("about") else None


def _bytes(network: Tensor) -> bytes:
    return network.cpu().numpy().tobytes()
