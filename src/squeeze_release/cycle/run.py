"""A run in progress: the network with an optimizer of its own, trained and judged by the functions of the caller."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..prune import AveragedScores, gradient_times_weight
from .config import Config, Epoch, Evaluate, Listener, MakeOptimizer, Result, TrainEpoch
from .directory import RunDirectory
from .subject import Subject, seeded


class Run(Subject):
    """What `cycle` works on."""

    optimizer: Optimizer | None

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
        super().__init__(example_inputs, config, directory, listeners)
        self.origin = origin
        self._train_epoch, self._evaluate, self._make_optimizer = train_epoch, evaluate, make_optimizer
        self._start: nn.Module | None = None  # read when it is asked for
        self.adopt(self.devices.place(copy.deepcopy(origin)))
        self.check_targets()

    def adopt(self, model: nn.Module, structure: str = "") -> None:
        super().adopt(model, structure)
        self.optimizer = None

    def enter(self, phase: str, **changes: Any) -> None:
        self.devices.close(self.model)
        self.optimizer = None
        super().enter(phase, **changes)

    def go_back(self) -> None:
        name = self.directory.network_name(self.started_from.cycle)
        self.adopt(self.devices.place(self.directory.load_network(self.origin, name)), name)
        if self.config.mode == "baseline":
            self.masks.take_zeros()  # it goes on with them

    # --------------------------------------------------------------------------------------------------------- training

    def open_phase(self) -> None:
        """The optimizer of this phase, with the hooks that keep zeros zero and that gather scores."""
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model, self.state.phase)
            self.optimizer.register_step_post_hook(self.masks.keep)
            self._averaged = AveragedScores(self.model, self.masks.names)
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
        self.seconds = time.perf_counter() - started
        self.state = replace(state, epoch=state.epoch + 1, seconds=state.seconds + self.seconds)

    def _unpruned(self) -> nn.Module:
        if self._start is None:
            self._start = self.directory.load_network(self.origin, self.directory.network_name(0))
            self.devices.place(self._start).eval()
        return self._start

    @torch.no_grad()
    def evaluate(self) -> float:
        return self.devices.mean(float(self._evaluate(self.model.eval())))

    def gathered(self) -> dict[str, Tensor]:
        return self._averaged(self.model) if self.config.score == "mean" else gradient_times_weight(self.model)

    def finish(self, test: Evaluate | None) -> Result:
        """Test the network that came out, once, and write the summary."""
        masked = self.sizes()["mask_alive"]
        dense = self.squeezed().model if self.config.mode == "baseline" else self.model
        accuracy = self.state.accuracy if test is None else self.devices.mean(float(test(dense.eval())))
        summary = self.summary(dense, masked, accuracy)
        return Result(dense, summary, self.state.points, self.directory, self.origin)
