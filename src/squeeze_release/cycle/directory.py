"""The files of a run.

    config.json             what the run does; a run is resumed only with the same
    metrics.jsonl           a line an epoch, a squeeze, a cycle
    cycle-000.safetensors   the network at the end of each cycle; 0 is the unpruned one
    state.safetensors       all that is needed to go on
    final.safetensors       the network that came out
    summary.json

Every file but the metrics is written beside its place and then renamed, so that it is whole whenever it is there. The
state says how long the metrics were: what a killed run wrote after it is cut off when the run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from ..store import load, save
from .config import Config, Point, State
from .devices import Devices

if TYPE_CHECKING:
    from .run import Run


class RunDirectory:
    """A folder that one run writes to. Only the first rank writes; all read."""

    def __init__(self, path: str | Path | None, config: Config, resume: bool, devices: Devices) -> None:
        self.path = Path(path or tempfile.mkdtemp(prefix="squeeze-release-"))
        if path is None:  # its networks are there as long as anyone may ask for them
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.devices = devices
        self._settle(config, resume)

    def _settle(self, config: Config, resume: bool) -> None:
        """Make the folder, or see that what is in it is this run."""
        file, wanted = self.path / "config.json", json.loads(json.dumps(asdict(config)))
        if file.exists() and not resume:
            raise InputError(
                f"{self.path} holds a run already",
                where="run_dir",
                consequence="no run was started, nothing was overwritten",
                remedy="resume it (resume=True, --resume), or give another folder",
            )
        if file.exists():
            found = json.loads(file.read_text())
            check_same(found, wanted, f"the run in {self.path}", "run_dir")
        self.devices.wait()  # until all have looked
        if self.devices.is_main and not file.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps(wanted, indent=2) + "\n")
        self.devices.wait()

    # ---------------------------------------------------------------------------------------------------------- metrics

    def log(self, line: Mapping[str, Any]) -> None:
        if self.devices.is_main:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    # --------------------------------------------------------------------------------------------------------- networks

    def network_name(self, cycle: int) -> str:
        return f"cycle-{cycle:03}.safetensors"

    def save_network(self, model: nn.Module, cycle: int) -> str:
        name = self.network_name(cycle)
        if self.devices.is_main:
            save(model, self.path / name)
        self.devices.wait()
        return name

    def load_network(self, origin: nn.Module, name: str) -> nn.Module:
        return load(origin, self.path / name)

    # ------------------------------------------------------------------------------------------------------------ state

    def write_state(self, run: Run) -> None:
        if self.devices.is_main:
            tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
            tensors |= {f"masks.{name}": units for name, units in run.masks.state().items()}
            tensors |= {f"scores.{name}": score for name, score in (run.scored or {}).items()}
            plain: dict[str, Any] | None = None
            if run.optimizer is not None:
                plain, moments = _flatten(run.optimizer)
                tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
            metrics = self.path / "metrics.jsonl"
            with metrics.open("a") as file:
                os.fsync(file.fileno())
            about = {"state": asdict(run.state), "optimizer": plain, "metrics": metrics.stat().st_size}
            # Cloned: safetensors stores no two names for one memory.
            whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            beside = self.path / "state.part"
            save_file(whole, beside, {"state": json.dumps(about)})
            _replace(beside, self.path / "state.safetensors")
        self.devices.wait()

    def read_state(self, run: Run) -> None:
        """Put a run where it was when its state was last written; one that has none begins at the beginning."""
        file = self.path / "state.safetensors"
        about: dict[str, Any] = {"metrics": 0}
        if file.exists():
            about, tensors = _read(file)
            state = with_points(about["state"])
            if state.structure:
                run.adopt(self.devices.place(self.load_network(run.origin, state.structure)))
            run.state = state
            run.model.load_state_dict(under("model.", tensors))
            run.masks.load_state(under("masks.", tensors))
            run.scored = like(run.model, under("scores.", tensors)) or None
            if about["optimizer"] is not None:
                run.open_phase()
                assert run.optimizer is not None
                _unflatten(run.optimizer, about["optimizer"], under("optimizer.", tensors))
        metrics = self.path / "metrics.jsonl"
        if self.devices.is_main and metrics.exists():
            os.truncate(metrics, about["metrics"])
        self.devices.wait()

    def finish(self, dense: nn.Module, summary: dict[str, Any]) -> None:
        if self.devices.is_main:
            save(dense, self.path / "final.safetensors")
            _write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.devices.wait()


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], run: str, where: str) -> None:
    """Raise an `InputError` that names the differences between two configurations."""
    other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if other:
        changes = ", ".join(f"{name} {found.get(name)!r} there, {wanted.get(name)!r} here" for name in other)
        raise InputError(
            f"{run} has another configuration: {changes}",
            where=where,
            consequence="the run was not resumed, nothing was overwritten",
            remedy="resume with the configuration it was started with, or begin another run",
        )


def with_points(state: Mapping[str, Any]) -> State:
    """From JSON."""
    return State(**{**state, "points": tuple(Point(**point) for point in state["points"])})


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(file, "pt") as opened:
            return json.loads(opened.metadata()["state"]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{file.name} cannot be read: {type(error).__name__}: {error}",
            where=str(file.parent),
            consequence="the run was not resumed",
            remedy="delete the file to begin the run anew",
        ) from error


def like(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the devices of the parameters of the same names."""
    return {name: tensor.to(model.get_parameter(name).device) for name, tensor in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _flatten(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of an optimizer as plain data and tensors."""
    state = optimizer.state_dict()
    plain: dict[str, Any] = {"groups": state["param_groups"], "state": {}}
    tensors: dict[str, Tensor] = {}
    for number, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            else:
                plain["state"].setdefault(str(number), {})[name] = value
    return plain, tensors


def _unflatten(optimizer: Optimizer, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(text)
    _replace(beside, path)


def _replace(beside: Path, path: Path) -> None:
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)
