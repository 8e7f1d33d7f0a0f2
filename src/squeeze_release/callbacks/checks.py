"""What cannot work inside another loop is said before the first epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from torch import nn

from ..cycle import Config
from ..errors import InputError, ModelError
from ..unwrap import unwrap

ELSEWHERE = "use sr.cycle, which has a loop of its own and trains on several devices through accelerate"


def check_config(config: Config) -> None:
    """`train_epochs` and `finetune_epochs` give the accuracies that pruning starts from."""
    for field in ("train_epochs", "finetune_epochs"):
        if getattr(config, field) < 1:
            raise refused(
                f"{field}={getattr(config, field)}: nobody would evaluate the network before it is pruned",
                f"CycleConfig({field}=)",
                "give at least 1: the loop evaluates after an epoch, never before",
            )
    for field in ("min_accuracy", "max_loss"):
        value = getattr(config, field)
        if value is not None:
            raise refused(
                f"{field}={value}: the network of an earlier cycle cannot take the place of the present",
                f"CycleConfig({field}=)",
                "give a run_dir, and take from it the network of the cycle you like, with sr.load",
            )


def check_length(config: Config, epochs: float, where: str) -> None:
    if 0 <= epochs <= config.train_epochs:
        raise refused(
            f"the loop ends after {epochs:g} epochs, and pruning begins after {config.train_epochs}",
            where,
            "train for more epochs, or give a smaller train_epochs",
        )


def check_metric(metric: str) -> None:
    if "loss" in metric:
        raise refused(
            f"{metric!r} looks like a loss, and larger must be better",
            "metric",
            "name an accuracy; or log minus the loss under another name, and give the threshold in its unit",
        )


def check_accuracy(metric: str, value: float) -> float:
    if math.isnan(value):
        raise InputError(
            f"{metric!r} is NaN",
            where="the evaluation of this epoch",
            consequence="it cannot be decided whether the update stands; the network is as it was trained",
            remedy="look at the learning rate, or at how the metric is computed",
        )
    return value


def check_model(model: nn.Module) -> None:
    """One process, one device, no wrapper: what is narrowed must be what is trained."""
    if unwrap(model) is not model:
        raise ModelError(
            f"the model is wrapped in {type(model).__name__}",
            where="the model itself",
            consequence="the wrapper would go on with the old widths; nothing was pruned",
            remedy=f"train the plain module (compile the small one afterwards), or {ELSEWHERE}",
        )
    for name, module in model.named_modules():
        if "forward" in vars(module) and not (module is model and _by_accelerate(model)):
            raise ModelError(
                "its forward was replaced on the object (torch.compile, or by hand)",
                where=name or type(model).__name__,
                consequence="a copy may run the original's weights, and nothing could be checked; nothing was pruned",
                remedy="train without torch.compile (compile the small one afterwards); override forward in a class",
            )


def refuse_many(what: str) -> InputError:
    return refused(f"{what}: several devices, or a sharded or wrapped model", "the trainer", ELSEWHERE)


def refused(what: str, where: str, remedy: str) -> InputError:
    return InputError(what, where=where, consequence="nothing was trained or pruned", remedy=remedy)


def _by_accelerate(model: nn.Module) -> bool:
    """For mixed precision: it is kept beside the original."""
    return "_original_forward" in vars(model)


@contextlib.contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Without accelerate's forward for mixed precision: what is traced and compared is what the model's code says."""
    own, names = vars(model), ("forward", "_original_forward") if _by_accelerate(model) else ()
    taken = {name: own.pop(name) for name in names if name in own}
    try:
        yield
    finally:
        own.update(taken)
