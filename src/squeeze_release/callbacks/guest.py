"""The cycle as a guest in a loop that is not ours.

    epoch_begins      squeeze and release, if a cycle's pruning is over; then an update may begin
    step_comes        gradients are there: what are the weights worth?
    training_ends     weights go, if they are judged at once
    epoch_ends        the loop has evaluated: does the update stand? what comes next?
    finish            the loop is over, wherever the cycle is

The decisions are those of `cycle/loop.py`. The network changes at the beginning of an epoch only, when training is sure
to follow: what the loop evaluates, stores and ends with has no fresh noise in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..cycle import Config
from ..cycle.config import Listener
from ..cycle.devices import Devices
from ..cycle.directory import RunDirectory
from ..cycle.loop import begin_update, end_cycle, end_training, judge, squeeze_step, start_pruning
from ..cycle.subject import Subject, seeded
from ..errors import InputError
from ..prune import AveragedScores, ChannelMasks, Masks
from ..rehearse import Call
from ..squeeze import Squeezed, squeeze
from .checks import own_forward
from .optimizer import rebind


class Guest(Subject):
    """The user's own model, narrowed in place, and the loop's own optimizer."""

    inplace = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        run_dir: str | Path | None = None,
        listeners: Sequence[Listener] = (),
        resume: bool = False,
    ) -> None:
        super().__init__(None, config, RunDirectory(run_dir, config, resume, Devices()), listeners)
        self.optimizer = optimizer
        self._started = time.perf_counter()
        self._open = False  # an epoch is under way
        self.waits = False  # its training is over, its accuracy is not known
        self.adopt(model)
        if config.grain == "weight":
            self.check_targets()
        self._hook = optimizer.register_step_post_hook(lambda *_: self.masks.keep())

    def adopt(self, model: nn.Module, structure: str = "") -> None:
        super().adopt(model, structure)
        self.worth = AveragedScores(model, self.masks.names)
        self.steps = 0

    def _all_alive(self, model: nn.Module) -> Masks | ChannelMasks:
        """Which weights make up a channel shows when the model is called: until inputs are known there are none."""
        if self.config.grain == "channel" and not self.knows_inputs:
            return Masks(model, [])
        with seeded(self.config.seed, "channels"), own_forward(model):
            return super()._all_alive(model)

    def trained(self, model: nn.Module) -> set[int]:
        """By the optimizer."""
        return super().trained(model) & {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    # --------------------------------------------------------------------------------------------------- the loop calls

    @property
    def knows_inputs(self) -> bool:
        return self.example_inputs is not None

    def take_inputs(self, call: Call) -> None:
        """Example inputs. Whether the model can be squeezed at all shows now, not at the end of a cycle."""
        device = next(self.model.parameters()).device
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), call)
        self.example_inputs, self.kwargs = args, kwargs
        with seeded(self.config.seed, "trial"), own_forward(self.model), _eval_mode(self.model):
            squeeze(self.model, args, kwargs, rules=self.config.rules, verify=False)
        if not self.masks.names:
            self.adopt(self.model, self.state.structure)
            self.check_targets()

    def epoch_begins(self) -> None:
        if self._open:
            raise InputError(
                "the epoch before this one was not evaluated at its end",
                where=f"cycle {self.state.cycle}, phase {self.state.phase!r}",
                consequence="it cannot be decided whether its update stands; the network is as it was trained",
                remedy="let the loop evaluate after the last batch of every epoch (Lightning: val_check_interval=1.0)",
            )
        self._open = True
        self._started = time.perf_counter()
        if self.state.phase == "squeeze":
            self.check_inputs("a squeeze comes first")
            squeeze_step(self)
        if self.state.phase == "prune" and self.before is None:  # it is there in a resumed epoch, or an update's second
            begin_update(self)
            self.scored = None

    def check_inputs(self, why: str) -> None:
        if not self.knows_inputs:
            raise InputError(
                f"the checkpoint could not hold the example inputs, and {why}",
                where=f"cycle {self.state.cycle}",
                consequence="there is nothing to call the network with; it is as the checkpoint has it",
                remedy="give example_inputs=",
            )

    def step_comes(self, may_overflow: bool = False) -> None:
        """The optimizer is about to step, with gradients that are whole and not scaled."""
        if self.state.phase != "prune" or (may_overflow and not self._finite()):
            return  # a scaler leaves out such a step too
        if self.config.score == "last":
            self.worth.forget()
        self.worth.see()
        self.steps += 1

    def _finite(self) -> bool:
        gradients = [p.grad for name in self.masks.names if (p := self.model.get_parameter(name)).grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def training_ends(self) -> None:
        self.seconds = time.perf_counter() - self._started
        self.state = replace(self.state, epoch=self.state.epoch + 1, seconds=self.state.seconds + self.seconds)
        self.waits = True
        if self.state.phase == "prune" and self._update_is_whole():
            end_training(self)

    def epoch_ends(self, accuracy: float) -> None:
        """Once it is evaluated, after `training_ends`."""
        config, phase, self.waits, self._open = self.config, self.state.phase, False, False
        if phase == "prune":
            if self._update_is_whole():
                judge(self, accuracy)
                if self.state.phase == "prune" and self.state.epoch >= config.prune_epochs:
                    self.enter("squeeze")
        elif phase != "done":
            totals = {"train": config.train_epochs, "finetune": config.finetune_epochs, "final": config.final_epochs}
            self.state = replace(self.state, accuracy=accuracy)
            self.log_epoch(totals[phase], accuracy)
            if self.state.epoch >= totals[phase] and phase != "final":
                (start_pruning if phase == "train" else end_cycle)(self, accuracy)
        if self.state.phase == "final" and self.state.epoch >= config.final_epochs:
            self.enter("done")

    @property
    def is_done(self) -> bool:
        return self.state.phase == "done"

    def finish(self) -> dict[str, Any] | None:
        """Leave a dense network behind. An update that nobody has judged is undone; what is masked goes."""
        self._hook.remove()
        if self.before is not None:
            self.restore(self.before)
        alive = self.sizes()["mask_alive"]
        if self.masks.alive < self.masks.total and self.knows_inputs:
            self.adopt(self.squeezed().model, "final.safetensors")
        self.enter("done")
        return self.summary(self.model, alive, self.state.accuracy) if self.state.points else None

    def _update_is_whole(self) -> bool:
        return self.state.epoch % self.config.epochs_an_update == 0

    # ------------------------------------------------------------------------------------------------------- in between

    def gathered(self) -> dict[str, Tensor]:
        if not self.steps:
            raise InputError(
                "the optimizer has made no step since the last update",
                where=f"cycle {self.state.cycle}, epoch {self.state.epoch} of its pruning",
                consequence="there is nothing to score the weights by",
                remedy="see that an epoch has at least as many batches as gradients are accumulated over",
            )
        self.steps = 0
        return self.worth(self.model)

    def squeezed(self) -> Squeezed:
        before = dict(self.model.named_parameters(remove_duplicate=False))
        with own_forward(self.model), _eval_mode(self.model):
            small, report = super().squeezed()
        rebind(self.optimizer, before, small, report)
        return Squeezed(small, report)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """And back: each module to its own mode, those that are new to that of the model."""
    whole, modes = model.training, {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = modes.get(module, whole)
