"""A network in the cycle: its masks and sizes, where it is, what is said of it. Who trains it is left open."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..prune import ChannelMasks, Masks, find_channels, find_targets, toward_dead_units
from ..squeeze import Squeezed, squeeze
from ..trace import as_calls
from .config import Config, Listener, Point, State, size
from .directory import RunDirectory

Snapshot = tuple[dict[str, Tensor], dict[str, Tensor]]


class Subject:
    """What the steps of the loop work on. `state` is plain data; all else is rebuilt or read when a run is resumed."""

    inplace = False  # squeeze the model itself, not a copy
    model: nn.Module
    masks: Masks | ChannelMasks
    scored: dict[str, Tensor] | None = None  # what the weights were worth in the last epoch, if an update goes by it
    before: Snapshot | None = None  # of the update that is under way

    def __init__(
        self,
        example_inputs: Any,
        config: Config,
        directory: RunDirectory,
        listeners: Sequence[Listener],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.example_inputs, self.kwargs = example_inputs, kwargs
        self.config, self.directory, self.devices, self.listeners = config, directory, directory.devices, listeners
        self.state = State()
        self.seconds = 0.0  # of the last epoch

    # ------------------------------------------------------------------------------------------------------ the network

    def adopt(self, model: nn.Module, structure: str = "") -> None:
        """Go on with another network, all of whose weights are alive."""
        self.model, self.scored, self.before = model, None, None
        self.masks = self._all_alive(model)
        self.state = replace(self.state, structure=structure)

    def _all_alive(self, model: nn.Module) -> Masks | ChannelMasks:
        config, trained = self.config, self.trained(model)
        if config.grain == "channel":
            untrained = (
                name
                for name, module in model.named_modules()
                if not trained.issuperset(map(id, module.parameters(recurse=False)))
            )
            channels = find_channels(model, self.example_inputs, self.kwargs, skip=(*config.skip, *untrained))
            return ChannelMasks(model, channels, config.multiple)
        targets = find_targets(model, conv=config.conv, joint=config.joint, skip=config.skip)
        ids = ({id(model.get_parameter(name)) for name in target.names} for target in targets)
        return Masks(model, [target for target, its in zip(targets, ids, strict=True) if its <= trained])

    def trained(self, model: nn.Module) -> set[int]:
        """Ids of what is trained. A frozen weight has no gradient, and would be the first to go."""
        return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    @property
    def min_accuracy(self) -> float | None:
        """What the result has to reach on the validation data."""
        loss = self.config.max_loss
        return self.config.min_accuracy if loss is None else self.state.points[0].accuracy - loss

    @property
    def floor(self) -> float | None:
        """The same for networks whose last fine-tuning is still to come."""
        return None if self.min_accuracy is None else self.min_accuracy - self.config.final_gain

    @property
    def candidates(self) -> list[Point]:
        """The networks that the last fine-tuning may begin with, the smallest first; without a floor, the last one."""
        floor, points = self.floor, self.state.points
        if floor is None:
            return [points[-1]]
        good = sorted((point for point in points if point.accuracy >= floor), key=size)
        return good or [max(points, key=lambda point: point.accuracy)]

    @property
    def started_from(self) -> Point:
        """The network that this phase began with."""
        if self.state.phase == "final":
            return self.candidates[self.state.candidate]
        return self.candidates[0] if self.config.retries else self.state.points[-1]

    @property
    def failures(self) -> int:
        """Cycles before this one that gave no network above the floor, if such are tried again."""
        if not self.config.retries:
            return 0
        before = [point for point in self.state.points if 0 < point.cycle < self.state.cycle]
        return self.state.cycle - 1 - sum(point.accuracy >= (self.floor or 0.0) for point in before)

    def go_back(self) -> None:
        """To the network that the next cycle, or the last fine-tuning, begins with."""
        raise NotImplementedError

    def check_targets(self) -> None:
        if not self.masks.names:
            raise InputError(
                "there is no weight to prune",
                where=type(self.model).__name__,
                consequence="no run was started",
                remedy="give a model with Linear or Conv layers, and let `skip` leave some of them",
            )

    def sizes(self, model: nn.Module | None = None) -> dict[str, int]:
        model = model or self.model
        weights = [model.get_parameter(name) for target in find_targets(model) for name in target.names]
        return {
            "mask_alive": sum(int(weight.count_nonzero()) for weight in weights),
            "deployable_weights": sum(weight.numel() for weight in weights),
            "deployable_params": sum(parameter.numel() for parameter in model.parameters()),
        }

    def snapshot(self) -> Snapshot:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return weights, {name: units.clone() for name, units in self.masks.state().items()}

    def restore(self, snapshot: Snapshot) -> None:
        weights, masks = snapshot
        self.model.load_state_dict(weights)
        self.masks.load_state(masks)

    def squeezed(self) -> Squeezed:
        """The present network, squeezed, and how exact that was in the metrics."""
        started, old = time.perf_counter(), self.model.eval()
        outputs = self._outputs(old)
        small, report = squeeze(old, self.example_inputs, self.kwargs, rules=self.config.rules, inplace=self.inplace)
        errors = {"max_error": report.max_error or 0.0, **_differences(outputs, self._outputs(small))}
        seconds = time.perf_counter() - started
        worst = {name: max(getattr(self.state, name), error) for name, error in errors.items()}
        self.state = replace(self.state, seconds=self.state.seconds + seconds, **worst)
        sizes = {"params_before": report.params_before, "params_after": report.params_after}
        self.log("squeeze", mask_alive=self.masks.alive, **sizes, **errors, seconds=seconds)
        return Squeezed(small, report)

    @torch.no_grad()
    def _outputs(self, model: nn.Module) -> list[Tensor]:
        """In the model's own dtype, with no shortcuts of a GPU: what the paper compares."""
        calls = as_calls(self.example_inputs, self.kwargs)
        with _no_tf32():
            leaves = torch.utils._pytree.tree_leaves([model(*args, **kwargs) for args, kwargs in calls])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]

    # ----------------------------------------------------------------------------------------------------------- scores

    def gathered(self) -> dict[str, Tensor]:
        """What the weights were worth in the epochs since the last update."""
        raise NotImplementedError

    def scores(self) -> dict[str, Tensor]:
        names, found = self.masks.names, self.gathered()
        found = self.devices.average({name: found[name] for name in names})
        return toward_dead_units(found, names, self.config.finish_units) if self.config.finish_units else found

    # --------------------------------------------------------------------------------------------------------- progress

    def enter(self, phase: str, **changes: Any) -> None:
        self.scored = None
        self.state = replace(self.state, phase=phase, epoch=0, **changes)

    def log(self, event: str, **values: Any) -> None:
        at = {"phase": self.state.phase, "cycle": self.state.cycle, "epoch": self.state.epoch}
        line = {"event": event, **at, **values}
        self.directory.log(line)
        if self.devices.is_main:
            for listener in self.listeners:
                listener(line)

    def log_epoch(self, total: int, accuracy: float, **values: Any) -> None:
        sizes = {"alive": self.masks.alive, "weights": self.masks.total}
        self.log("epoch", epochs=total, accuracy=accuracy, **sizes, seconds=self.seconds, **values)

    def record(self, number: int, accuracy: float) -> None:
        """A point of the curve, and its network on disk."""
        point = Point(number, accuracy, **self.sizes())
        self.state = replace(self.state, points=(*self.state.points, point))
        self.directory.save_network(self.model, number)
        self.log("cycle", **asdict(point))

    def summary(self, dense: nn.Module, mask_alive: int, accuracy: float | None) -> dict[str, Any]:
        """What came out, written to disk too."""
        points, start = self.state.points, self.state.points[0]
        summary = {
            "accuracy": accuracy,
            "validation_accuracy": self.state.accuracy,
            **self.sizes(dense),
            "mask_alive": mask_alive,
            "cycles": points[-1].cycle,
            "unpruned_weights": start.deployable_weights,
            "unpruned_params": start.deployable_params,
            "max_error": self.state.max_error,
            "max_difference": self.state.max_difference,
            "max_relative": self.state.max_relative,
            "seconds": round(self.state.seconds, 3),
        }
        self.directory.finish(dense, summary)
        return summary


def _differences(one: list[Tensor], other: list[Tensor]) -> dict[str, float]:
    """The largest of any output, as it is and relative to the largest output."""
    found = [(float((a - b).abs().max()), float(a.abs().max())) for a, b in zip(one, other, strict=True)]
    relative = [difference / (size or 1.0) for difference, size in found]
    return {
        "max_difference": max((difference for difference, _ in found), default=0.0),
        "max_relative": max(relative, default=0.0),
    }


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    """GPUs round the factors of a float32 product to 10 bits where they may: as much as 1e-3, whatever the network."""
    flags: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = False
        yield
    finally:
        for flag, allowed in zip(flags, before, strict=True):
            flag.allow_tf32 = allowed


@contextlib.contextmanager
def seeded(seed: int, *where: object) -> Iterator[None]:
    """All random numbers in here follow from the run's seed and the place in the run, not from what came before.

    Those drawn afterwards are what they would have been without.
    """
    number = int.from_bytes(hashlib.sha256(repr((seed, *where)).encode()).digest()[:4], "little")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    numpy, ours = sys.modules.get("numpy"), random.getstate()
    theirs = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices):
        torch.manual_seed(number)
        random.seed(number)
        if numpy:
            numpy.random.seed(number)
        try:
            yield
        finally:
            random.setstate(ours)
            if numpy and theirs:
                numpy.random.set_state(theirs)
