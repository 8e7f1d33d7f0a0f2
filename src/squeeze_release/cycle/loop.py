"""The loop.

    train -> prune -> squeeze -> finetune -> prune -> ... -> final -> done

Every step does one thing: an epoch, a pruning update, a squeeze. Between two steps the whole state can go to disk, and
every epoch draws from a seed of its own: a run that was killed goes on as if it never had been.

What is decided between two epochs are functions of a `Subject`, so that other people's loops can drive it too: see
`callbacks/guest.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, RunStopped
from ..release import release
from .config import SCHEDULES, Config, Evaluate, Listener, MakeOptimizer, Result, TrainEpoch
from .devices import Devices
from .directory import RunDirectory
from .run import Run
from .subject import Subject, seeded


def cycle(
    model: nn.Module,
    example_inputs: Any,
    *,
    train_epoch: TrainEpoch,
    evaluate: Evaluate,
    optimizer: MakeOptimizer,
    config: Config | None = None,
    test: Evaluate | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    accelerator: Any = None,
    checkpoint_seconds: float = 30.0,
    stop_after: float | None = None,
) -> Result:
    """Prune, squeeze, release, fine-tune, until the network can take no more. `model` itself is left as it is.

    Args:
        train_epoch: trains a model for one epoch: `train_epoch(model, optimizer, epoch)`. What is pruned stays zero by
            itself, through a hook on the optimizer.
        evaluate: the accuracy of a model on validation data, from 0 to 1. Every decision is made by it.
        optimizer: makes one for a model and a phase ("train", "prune", "finetune", "final"), anew for every phase.
        test: the accuracy on test data; called once, on the network that came out.
        run_dir: a folder for config, metrics, networks, state and summary.
        resume: go on with the run in `run_dir`, if there is one.
        listeners: called with every line of the metrics; `Bars()` draws them.
        accelerator: an `accelerate.Accelerator`, to train on several devices.
        checkpoint_seconds: how often, at most, the state is written.
        stop_after: seconds, after which all is written and `RunStopped` is raised: to be resumed, elsewhere too.
    """
    config = config or Config()
    if stop_after is not None and run_dir is None:
        raise InputError(
            "a run that stops needs a folder to be resumed from",
            where="cycle(..., stop_after=)",
            consequence="no run was started",
            remedy="give run_dir= (--run-dir)",
        )
    directory = RunDirectory(run_dir, config, resume, Devices(accelerator))
    run = Run(model, example_inputs, train_epoch, evaluate, optimizer, config, directory, listeners)
    directory.read_state(run)
    started = written = time.monotonic()
    while run.state.phase != "done":
        STEPS[run.state.phase](run)
        now = time.monotonic()
        late = stop_after is not None and run.devices.mean(now - started) > stop_after  # all ranks stop at one step
        if late or now - written >= checkpoint_seconds:
            directory.write_state(run)
            written = time.monotonic()
        if late and run.state.phase != "done":
            raise _stopped(run, stop_after)
    directory.write_state(run)
    return run.finish(test)


def _stopped(run: Run, stop_after: float | None) -> RunStopped:
    state = run.state
    return RunStopped(
        f"the run has used up its {stop_after:g} seconds",
        where=f"cycle {state.cycle}, {state.phase}, after {state.epoch} epochs of it",
        consequence=f"it stands still in {run.directory.path}",
        remedy="resume it (resume=True, --resume); the folder may be moved to another machine",
    )


def train_step(run: Run) -> None:
    """An epoch of the unpruned network."""
    total = run.config.train_epochs
    if run.state.epoch < total:
        run.train(total)
        run.log_epoch(total, run.evaluate())
    else:
        start_pruning(run, run.evaluate())


def start_pruning(run: Subject, accuracy: float) -> None:
    run.record(0, accuracy)
    run.enter("prune", accuracy=accuracy)


def prune_step(run: Run) -> None:
    """Train for the epochs of an update, let weights go, and see whether the network stands it."""
    if run.state.epoch >= run.config.prune_epochs:
        return run.enter("squeeze")
    begin_update(run)
    for _ in range(run.config.epochs_an_update):
        run.train(run.config.prune_epochs)
    end_training(run)
    judge(run, run.evaluate())


def begin_update(run: Subject) -> None:
    """Judged after training, the weights go first, by what they were worth in the epochs before."""
    run.before = run.snapshot()
    if run.config.judged == "after training" and run.scored is not None:
        let_go(run, run.scored)


def end_training(run: Subject) -> None:
    """Judged at once, they go now."""
    run.scored = run.scores()
    if run.config.judged == "at once":
        let_go(run, run.scored)
        run.scored = None


def judge(run: Subject, accuracy: float) -> None:
    config, before, accuracy_before = run.config, run.before, run.state.accuracy
    fell = accuracy_before is not None and accuracy < accuracy_before - config.max_drop
    undone = accuracy < config.threshold or fell
    run.log_epoch(config.prune_epochs, accuracy, undone=undone)
    run.before = None
    if not undone:
        run.state = replace(run.state, accuracy=accuracy)
        return
    assert before is not None
    run.restore(before)
    first = 0 if config.judged == "at once" else config.epochs_an_update  # when the cycle's first weights went
    if run.state.epoch - config.epochs_an_update > first:
        run.enter("squeeze")
    else:
        try_again(run)


def let_go(run: Subject, scored: dict[str, Tensor]) -> None:
    elapsed = run.state.epoch / run.config.prune_epochs
    last = run.config.last_ratio**0.5**run.failures
    run.masks.prune(scored, SCHEDULES[run.config.schedule](elapsed, last=last))


def squeeze_step(run: Subject) -> None:
    """Squeeze and release. The baseline goes on with its masked network."""
    config, number, last = run.config, run.state.cycle, run.started_from
    if config.mode == "baseline":
        smaller = run.sizes()["mask_alive"] < last.mask_alive
    else:
        small = run.squeezed().model
        with seeded(config.seed, "release", number, 0):
            release(small, scale=config.release_scale, pool=config.release_pool)
        run.adopt(small, run.directory.save_network(small, number))
        smaller = bool(run.masks.total) and run.sizes()["deployable_params"] < last.deployable_params
    if smaller:
        run.enter("finetune")
    else:
        try_again(run)


def finetune_step(run: Run) -> None:
    """An epoch of fine-tuning; after the last one, the next cycle."""
    total = run.config.finetune_epochs
    if run.state.epoch < total:
        run.train(total)
        run.log_epoch(total, run.evaluate())
    else:
        end_cycle(run, run.evaluate())


def end_cycle(run: Subject, accuracy: float) -> None:
    config, number = run.config, run.state.cycle
    run.record(number, accuracy)
    if config.retries and accuracy < (run.floor or 0.0):
        try_again(run)
    elif number < config.max_cycles:
        run.enter("prune", cycle=number + 1, accuracy=accuracy)
    else:
        run.enter("final")


def try_again(run: Subject) -> None:
    """A cycle came to nothing. The next one begins where it did and goes half as far; or that was the last."""
    number = run.state.cycle
    if number < run.config.max_cycles and run.failures < run.config.retries:
        run.go_back()
        run.enter("prune", cycle=number + 1, accuracy=run.started_from.accuracy)
    else:
        run.enter("final")


def final_step(run: Run) -> None:
    """An epoch of the last fine-tuning, of the network that was chosen; if that is not enough, of the next larger."""
    total, floor = run.config.final_epochs, run.min_accuracy
    if run.state.epoch == 0 and floor is not None:
        run.go_back()
    if run.state.epoch < total:
        run.train(total)
        run.log_epoch(total, run.evaluate())
    if run.state.epoch >= total:
        accuracy, number = run.evaluate(), run.state.candidate + 1
        if floor is not None and accuracy < floor and number < len(run.candidates):
            run.enter("final", candidate=number)
        else:
            run.enter("done", accuracy=accuracy)


STEPS: dict[str, Callable[[Run], None]] = {
    "train": train_step,
    "prune": prune_step,
    "squeeze": squeeze_step,
    "finetune": finetune_step,
    "final": final_step,
}
