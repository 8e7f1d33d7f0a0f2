"""A run in progress: the network, its masks and its optimizer, and where it is."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from ..prune import AveragedScores, Masks, find_targets, gradient_times_weight, toward_dead_units
from ..squeeze import squeeze
from .config import Config, Epoch, Evaluate, Listener, MakeOptimizer, Point, Result, State, TrainEpoch, smallest
from .directory import RunDirectory

Snapshot = tuple[dict[str, Tensor], dict[str, Tensor]]


class Run:
    """What the steps of the loop work on. `state` is plain data; all else is rebuilt or read when a run is resumed."""

    optimizer: Optimizer | None
    scored: dict[str, Tensor] | None  # what the weights were worth in the last epoch, if the next update goes by it

    def __init__(
        self,
        origin: nn.Module,
        example_inputs: Any,
        train_epoch: TrainEpoch,
        evaluate: Evaluate,
        make_optimizer: MakeOptimizer,
        config: Config,
        directory: RunDirectory,
        listeners: Sequence[Listener],
    ) -> None:
        self.origin, self.example_inputs = origin, example_inputs
        self._train_epoch, self._evaluate, self._make_optimizer = train_epoch, evaluate, make_optimizer
        self.config, self.directory, self.devices, self.listeners = config, directory, directory.devices, listeners
        self.state = State()
        self._start: nn.Module | None = None  # read when it is asked for
        self.adopt(self.devices.place(copy.deepcopy(origin)))
        if not self.masks.targets:
            raise InputError(
                "there is no weight to prune",
                where=type(origin).__name__,
                consequence="no run was started",
                remedy="give a model with Linear or Conv layers, and let `skip` leave some of them",
            )

    # ------------------------------------------------------------------------------------------------------ the network

    def adopt(self, model: nn.Module, structure: str = "") -> None:
        """Go on with another network, all of whose weights are alive."""
        config = self.config
        self.model, self.optimizer, self.scored = model, None, None
        self.masks = Masks(model, find_targets(model, conv=config.conv, joint=config.joint, skip=config.skip))
        self.state = replace(self.state, structure=structure)

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

    def squeezed(self) -> nn.Module:
        """The present network, squeezed, and how exact that was in the metrics."""
        started, old = time.perf_counter(), self.model.eval()
        small, report = squeeze(old, self.example_inputs, rules=self.config.rules)
        error, difference = report.max_error or 0.0, self._difference(old, small)
        seconds = time.perf_counter() - started
        self.state = replace(
            self.state,
            max_error=max(self.state.max_error, error),
            max_difference=max(self.state.max_difference, difference),
            seconds=self.state.seconds + seconds,
        )
        sizes = {"params_before": report.params_before, "params_after": report.params_after}
        errors = {"max_error": error, "max_difference": difference}
        self.log("squeeze", mask_alive=self.masks.alive, **sizes, **errors, seconds=seconds)
        return small

    @torch.no_grad()
    def _difference(self, old: nn.Module, new: nn.Module) -> float:
        """The largest of any output, in the model's own dtype: what the paper gives."""
        inputs = self.example_inputs if isinstance(self.example_inputs, tuple) else (self.example_inputs,)
        one, other = (torch.utils._pytree.tree_leaves(model(*inputs)) for model in (old, new))
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, Tensor) and a.numel()]
        return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)

    def choose(self) -> None:
        """With a floor for the accuracy, go on with the smallest network above it, or the best if none is."""
        floor, points = self.config.min_accuracy, self.state.points
        if floor is not None:
            best = smallest(points, floor) or max(points, key=lambda point: point.accuracy)
            name = self.directory.network_name(best.cycle)
            self.adopt(self.devices.place(self.directory.load_network(self.origin, name)), name)

    # --------------------------------------------------------------------------------------------------------- training

    def open_phase(self) -> None:
        """The optimizer of this phase, with the hooks that keep zeros zero and that gather scores."""
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model, self.state.phase)
            self.optimizer.register_step_post_hook(self.masks.keep)
            self._averaged = AveragedScores(self.model, self._prunable())
            if self.config.score == "mean" and self.state.phase == "prune":
                self.optimizer.register_step_pre_hook(self._averaged.see)
            self._wrapped = self.devices.prepare(self.model, self.optimizer)

    def train(self, total: int) -> None:
        """One epoch."""
        self.open_phase()
        state, started = self.state, time.perf_counter()
        model, optimizer = self._wrapped
        with seeded(self.config.seed, state.phase, state.cycle, state.epoch):
            epoch = Epoch(state.phase, state.cycle, state.epoch, total, self._unpruned)
            self._train_epoch(model.train(), optimizer, epoch)
        self.devices.agree_on_buffers(self.model)
        self._seconds = time.perf_counter() - started
        self.state = replace(state, epoch=state.epoch + 1, seconds=state.seconds + self._seconds)

    def _unpruned(self) -> nn.Module:
        if self._start is None:
            self._start = self.directory.load_network(self.origin, self.directory.network_name(0))
            self.devices.place(self._start).eval()
        return self._start

    @torch.no_grad()
    def evaluate(self) -> float:
        return self.devices.mean(float(self._evaluate(self.model.eval())))

    def scores(self) -> dict[str, Tensor]:
        names = self._prunable()
        found = self._averaged(self.model) if self.config.score == "mean" else gradient_times_weight(self.model)
        found = self.devices.average({name: found[name] for name in names})
        return toward_dead_units(found, names, self.config.finish_units) if self.config.finish_units else found

    def _prunable(self) -> list[str]:
        return [name for target in self.masks.targets for name in target.names]

    # --------------------------------------------------------------------------------------------------------- progress

    def enter(self, phase: str, **changes: Any) -> None:
        self.devices.close(self.model)
        self.optimizer, self.scored = None, None
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
        self.log("epoch", epochs=total, accuracy=accuracy, **sizes, seconds=self._seconds, **values)

    def record(self, number: int, accuracy: float) -> None:
        """A point of the curve, and its network on disk."""
        point = Point(number, accuracy, **self.sizes())
        self.state = replace(self.state, points=(*self.state.points, point))
        self.directory.save_network(self.model, number)
        self.log("cycle", **asdict(point))

    def finish(self, test: Evaluate | None) -> Result:
        """Test the network that came out, once, and write the summary."""
        masked = self.sizes()
        dense = self.squeezed() if self.config.mode == "baseline" else self.model
        validation = self.state.accuracy
        accuracy = validation if test is None else self.devices.mean(float(test(dense.eval())))
        points, start = self.state.points, self.state.points[0]
        summary = {
            "accuracy": accuracy,
            "validation_accuracy": validation,
            **self.sizes(dense),
            "mask_alive": masked["mask_alive"],
            "cycles": points[-1].cycle,
            "unpruned_weights": start.deployable_weights,
            "unpruned_params": start.deployable_params,
            "max_error": self.state.max_error,
            "max_difference": self.state.max_difference,
            "seconds": round(self.state.seconds, 3),
        }
        self.directory.finish(self, dense, summary)
        return Result(dense, summary, points, self.directory, self.origin)


@contextlib.contextmanager
def seeded(seed: int, *where: object) -> Iterator[None]:
    """All random numbers in here follow from the run's seed and the place in the run, not from what came before."""
    number = int.from_bytes(hashlib.sha256(repr((seed, *where)).encode()).digest()[:4], "little")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
        yield
