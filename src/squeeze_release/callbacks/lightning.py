"""For Lightning, in either of its packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..cycle import Config
from ..cycle.config import Listener
from ..errors import InputError
from ..rehearse import Call
from .checks import check_accuracy, check_length, check_model, refuse_many, refused
from .guest import Guest
from .host import Host
from .inputs import Watch, as_call
from .resume import check_config_of, from_state, narrow, pack, unpack

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
AVERAGES = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def _callback() -> Any:
    """The base class, of the package that is in use already."""
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise refused("Lightning is not installed", "squeeze_release.callbacks", "install lightning, or pytorch-lightning")


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _callback()


class SqueezeReleaseCallback(Host, Callback):
    """Prune, squeeze, release and fine-tune inside `Trainer.fit`. The module is narrowed in place.

    Args:
        config: what the cycle does; `CycleConfig`. The fit ends when the cycle does, or at its own max_epochs.
        metric: what decides: a metric that `validation_step` logs, larger is better.
        network: the part of the LightningModule that is pruned, by its dotted name; "" for all of it, by its forward.
        example_inputs: a tensor or a tuple of arguments for the network, or a dict of keyword arguments. Without them
            `example_input_array` of the module counts, or what the network is first called with.
        run_dir: a folder for metrics and networks, as that of `cycle`.
        listeners: called with every line of the metrics.
    """

    def __init__(
        self,
        config: Config,
        metric: str,
        *,
        network: str = "",
        example_inputs: Any = None,
        run_dir: str | Path | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(config, metric, example_inputs, run_dir, listeners)
        self.network = network
        self._undo: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------------------------ start

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._check(trainer, pl_module)
            self._guest, self._resumed, self.summary = None, None, None
        self._narrow_on_load(pl_module)

    def _narrow_on_load(self, pl_module: Any) -> None:
        """Lightning loads the weights before it asks callbacks, and asks the module before that: so we ask along."""
        asked, own = pl_module.on_load_checkpoint, vars(pl_module).get("on_load_checkpoint")

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            resumed = from_state(checkpoint.get("callbacks", {}).get(self.state_key, {}))
            if resumed:
                narrow(self._part(pl_module), resumed)
            asked(checkpoint)

        def undo() -> None:
            vars(pl_module).pop("on_load_checkpoint", None)
            if own is not None:
                pl_module.on_load_checkpoint = own

        pl_module.on_load_checkpoint, self._undo = on_load_checkpoint, undo

    def _check(self, trainer: Any, pl_module: Any) -> None:
        check_model(pl_module)
        self._part(pl_module)
        strategy = type(trainer.strategy).__name__
        if trainer.world_size > 1 or strategy != "SingleDeviceStrategy":
            raise refuse_many(f"the trainer has {trainer.world_size} processes and {strategy}")
        averages = [type(each).__name__ for each in trainer.callbacks if type(each).__name__ in AVERAGES]
        if averages:
            raise refused(
                f"{averages[0]} keeps a copy of the model, which would keep its widths",
                "Trainer(callbacks=)",
                "take it out, and average the small network's weights in a fit of its own",
            )
        if trainer.check_val_every_n_epoch != 1:
            raise refused(
                f"check_val_every_n_epoch={trainer.check_val_every_n_epoch}, and every epoch is judged",
                "Trainer(check_val_every_n_epoch=)",
                "leave it at 1",
            )
        check_length(self.config, trainer.max_epochs or -1, "Trainer(max_epochs=)")

    def _part(self, pl_module: Any) -> nn.Module:
        try:
            part: nn.Module = pl_module.get_submodule(self.network)
        except AttributeError:
            remedy = "use a dotted name of named_modules()"
            raise refused(f"the module has no part {self.network!r}", "network", remedy) from None
        return part

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._clean_up()
        if not sum(trainer.num_val_batches):
            raise refused(
                "there is no validation data",
                "Trainer.fit",
                f"give a validation loader, and log {self.metric!r} in validation_step",
            )
        if len(trainer.optimizers) != 1:
            raise refused(f"there are {len(trainer.optimizers)} optimizers", "configure_optimizers", "return one")
        model = self._part(pl_module)
        resume = self._resumed is not None
        guest = Guest(model, trainer.optimizers[0], self.config, self.run_dir, self.listeners, resume)
        given = self._given(pl_module)
        if given is not None:
            guest.take_inputs(trainer.precision_plugin.convert_input(given))
        if self._resumed is not None:
            check_config_of(self._resumed, self.config, "Trainer.fit(ckpt_path=)")
            unpack(guest, self._resumed)
            self._resumed = None
        self._guest = guest
        if not guest.knows_inputs:
            self._watch = Watch(model)

    def _given(self, pl_module: Any) -> Call | None:
        if self.example_inputs is not None:
            return as_call(self.example_inputs)
        example = None if self.network else pl_module.example_input_array
        return None if example is None else as_call(example)

    # ------------------------------------------------------------------------------------------------------- the epochs

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._running().epoch_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            call, self._watch = self._watch.seen("network='NAME' if training_step calls a part of the module"), None
            self._running().take_inputs(call)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._running().step_comes(getattr(trainer.precision_plugin, "scaler", None) is not None)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if _ends_epoch(trainer):
            self._running().training_ends()
            trainer.callback_metrics.pop(self.metric, None)  # that of the epoch before

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not _ends_epoch(trainer):
            return
        value = trainer.callback_metrics.get(self.metric)
        if value is None:
            raise InputError(
                f"validation logs no {self.metric!r}, but {', '.join(sorted(trainer.callback_metrics)) or 'nothing'}",
                where="SqueezeReleaseCallback(metric=)",
                consequence="it cannot be decided whether the update stands; the network is as it was trained",
                remedy=f"self.log({self.metric!r}, ...) in validation_step, or name a metric that is logged there",
            )
        guest = self._running()
        guest.epoch_ends(check_accuracy(self.metric, float(value)))
        trainer.should_stop = trainer.should_stop or guest.is_done

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.summary = self._running().finish()

    def _running(self) -> Guest:
        assert self._guest is not None
        return self._guest

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return pack(self._guest)._asdict() if self._guest else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = from_state(state_dict)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._clean_up()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        """Leave nothing on the module that a copy of it would take along."""
        if self._undo is not None:
            self._undo()
        if self._watch is not None:
            self._watch.close()
        self._undo, self._watch = None, None


def _ends_epoch(trainer: Any) -> bool:
    """Whether this validation follows the last batch of an epoch of `fit`."""
    in_fit = str(getattr(trainer.state.fn, "value", "")) == "fit" and not trainer.sanity_checking
    return in_fit and bool(trainer.is_last_batch)
