"""For the `Trainer` of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..cycle import Config
from ..cycle.config import Listener
from ..errors import InputError
from .checks import check_accuracy, check_length, check_model, refuse_many, refused
from .guest import Guest
from .host import Host
from .inputs import Watch, as_call
from .resume import check_config_of, narrow, pack, read, unpack, write

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise refused(
            "transformers is not installed", "squeeze_release.callbacks", "install transformers and accelerate"
        ) from error

FOR_THE_LOSS = ("labels", "label", "label_ids", "start_positions", "end_positions", "num_items_in_batch")


class SqueezeReleaseTrainerCallback(Host, TrainerCallback):
    """Prune, squeeze, release and fine-tune inside `Trainer.train`. The model is narrowed in place.

    Args:
        config: what the cycle does; `CycleConfig`. Training ends when the cycle does, or after its own epochs.
        metric: what decides: a metric of `compute_metrics`, larger is better ("accuracy", or "eval_accuracy").
        example_inputs: a dict of keyword arguments for the model, a tensor, or a tuple of arguments. Without them the
            first batch counts, less its labels.
        run_dir: a folder for metrics and networks, as that of `cycle`.
        listeners: called with every line of the metrics.
    """

    def __init__(
        self,
        config: Config,
        metric: str,
        *,
        example_inputs: Any = None,
        run_dir: str | Path | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(config, metric, example_inputs, run_dir, listeners)
        self.metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        self._save_later = False
        self._seen: set[str] = set()  # metrics, since the last batch

    def resume(self, model: nn.Module, checkpoint: str | Path) -> None:
        """Give a full-size model the widths of a checkpoint, in place, and go on from there.

        Call it before `Trainer.train(resume_from_checkpoint=checkpoint)`, which loads the weights.
        """
        resumed = read(checkpoint)
        check_config_of(resumed, self.config, str(checkpoint))
        narrow(model, resumed)
        self._resumed = resumed

    # ------------------------------------------------------------------------------------------------------------ start

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._check(args, state, model)
        self.summary = None
        raw = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        guest = Guest(model, raw, self.config, self.run_dir, self.listeners, self._resumed is not None)
        if self.example_inputs is not None:
            guest.take_inputs(as_call(self.example_inputs))
        if self._resumed is not None:
            unpack(guest, self._resumed)
            self._resumed = None
        self._guest = guest
        if not guest.knows_inputs:
            self._watch = Watch(model, {*FOR_THE_LOSS, *(args.label_names or ())})

    def _check(self, args: Any, state: Any, model: Any) -> None:
        if args.parallel_mode.value != "not_parallel":
            raise refuse_many(f"the trainer is in parallel mode {args.parallel_mode.value!r}")
        if args.torch_compile:
            raise refused("torch_compile=True", "TrainingArguments", "compile the small model afterwards")
        if args.load_best_model_at_end:
            raise refused(
                "load_best_model_at_end=True: the best checkpoint has other widths than the model at the end",
                "TrainingArguments",
                "leave it out; with run_dir= the network of every cycle is there for sr.load",
            )
        check_model(model)
        check_length(self.config, args.num_train_epochs if args.max_steps <= 0 else -1, "num_train_epochs")
        step = json.loads(self._resumed.about)["step"] if self._resumed else 0
        if state.global_step != step:
            raise refused(
                f"training goes on from step {state.global_step}, pruning from step {step}",
                "Trainer.train(resume_from_checkpoint=)",
                "call callback.resume(model, CHECKPOINT) with the same checkpoint, before Trainer.train",
            )

    # ------------------------------------------------------------------------------------------------------- the epochs

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running().waits:
            raise InputError(
                f"the evaluation gives no {self.metric!r}, but {', '.join(sorted(self._seen))}",
                where="SqueezeReleaseTrainerCallback(metric=)",
                consequence="it cannot be decided whether the update stands; the network is as it was trained",
                remedy="let compute_metrics return it, or name a metric that it returns",
            )
        self._seen.clear()
        self._running().epoch_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._look()
        self._running().step_comes(args.fp16)

    def _look(self) -> None:
        if self._watch is not None:
            call, self._watch = self._watch.seen("let compute_loss call the model"), None
            self._running().take_inputs(call)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """A checkpoint after an epoch's last step waits for the epoch's end: training would go on after that."""
        if control.should_save and abs(state.epoch - round(state.epoch)) < 1e-6:
            control.should_save, self._save_later = False, True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._running().training_ends()
        control.should_evaluate = True
        control.should_save, self._save_later = control.should_save or self._save_later, False
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> Any:
        guest = self._guest
        if guest is None or not guest.waits:
            return control  # in the middle of an epoch, or not in training
        self._seen |= {*metrics}
        if self.metric not in metrics:
            return control  # there may be several sets of data, one after the other
        guest.epoch_ends(check_accuracy(self.metric, float(metrics[self.metric])))
        control.should_training_stop = control.should_training_stop or guest.is_done
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._guest is not None and folder.is_dir():
            write(pack(self._guest, step=state.global_step), folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.summary = self._running().finish()

    def _running(self) -> Guest:
        assert self._guest is not None
        return self._guest
