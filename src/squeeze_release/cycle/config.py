"""What a run does, where it is, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..errors import InputError, check_choice
from ..prune import cubic, linear

if TYPE_CHECKING:
    from .directory import RunDirectory

SCHEDULES = {"cubic": cubic, "linear": linear}
MODES = ("squeeze-release", "baseline")
SCORES = ("last", "mean")
GRAINS = ("weight", "channel")
JUDGED = ("at once", "after training")


@dataclass(frozen=True)
class Config:
    """What a run does. The defaults are the paper's, for its fully connected network.

    Attributes:
        mode: "squeeze-release"; or "baseline", which only prunes, with one mask that accumulates, and squeezes at the
            end.
        train_epochs: of the unpruned network, before the first cycle.
        prune_epochs: the length of a cycle's pruning.
        epochs_an_update: how many of these one update takes.
        judged: an update is judged "at once", before any training, so that cycles are many and gentle; or "after
            training" for its epochs, so that they are few and deep.
        schedule: "cubic" or "linear", from all of the cycle's weights to `last_ratio` of them.
        last_ratio: the part of them that a whole cycle would leave.
        threshold: an update after which the validation accuracy is below this is undone and ends the cycle's pruning;
            if it is the cycle's first, the run ends.
        max_drop: so is an update after which it has fallen by more than this.
        finetune_epochs: after each squeeze.
        final_epochs: at the very end.
        max_cycles: the run ends after so many.
        score: |grad * weight| on the "last" batch, or its "mean" over the epoch.
        finish_units: above 0, prefers weights of rows and columns that are nearly dead; see `prune.toward_dead_units`.
        grain: a "weight", or a row or filter, as the next three say; or a whole "channel", see `prune.find_channels`.
        multiple: with channels, of what the widths should be; see `prune.ChannelMasks`.
        conv: in which units weights of convolutions go; see `prune.find_targets`.
        joint: rows of q, k and v go together; see `prune.find_targets`.
        skip: names of modules that are left alone.
        release_scale: see `release`.
        release_pool: see `release`.
        rules: of every squeeze; see `squeeze`.
        min_accuracy: the result is the smallest network whose validation accuracy is at least this; None for the last
            one.
        max_loss: the same floor, as far below the unpruned network's accuracy: 0.01 for a point.
        final_gain: how far below this floor a network may be before its last fine-tuning: the smallest is tried first,
            and if it does not get above the floor, the next larger one.
        retries: with such a floor, a cycle that comes to nothing or ends below it is tried again, from the smallest
            network above it and half as far; the run ends when more than so many failed. With 0 it goes on below it.
        seed: of every draw and of every epoch's shuffling.
    """

    mode: str = "squeeze-release"
    train_epochs: int = 0
    prune_epochs: int = 160
    epochs_an_update: int = 1
    judged: str = "at once"
    schedule: str = "cubic"
    last_ratio: float = 0.002
    threshold: float = 0.8
    max_drop: float = 0.1
    finetune_epochs: int = 20
    final_epochs: int = 20
    max_cycles: int = 100
    score: str = "last"
    finish_units: float = 0.0
    grain: str = "weight"
    multiple: int = 1
    conv: str = "filter"
    joint: bool = False
    skip: tuple[str, ...] = ()
    release_scale: float = 0.01
    release_pool: str = "layer"
    rules: str = "all"
    min_accuracy: float | None = None
    max_loss: float | None = None
    final_gain: float = 0.0
    retries: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {"mode": MODES, "schedule": tuple(SCHEDULES), "score": SCORES, "judged": JUDGED, "grain": GRAINS}
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed, of="CycleConfig", consequence="no run was started")
        if self.min_accuracy is not None and self.max_loss is not None:
            raise InputError(
                f"two floors: min_accuracy={self.min_accuracy} and max_loss={self.max_loss}",
                where="CycleConfig(max_loss=)",
                consequence="no run was started",
                remedy="give one of them, and None for the other (null on the command line)",
            )
        if self.retries and self.min_accuracy is None and self.max_loss is None:
            raise InputError(
                f"retries={self.retries} without a floor: no cycle would ever fail",
                where="CycleConfig(retries=)",
                consequence="no run was started",
                remedy="give min_accuracy or max_loss too",
            )


@dataclass(frozen=True)
class Epoch:
    """Where a run is: what a training function needs to know, for its learning rate say."""

    phase: str  # train, prune, finetune or final
    cycle: int
    index: int  # from 0
    total: int  # epochs of this phase
    unpruned: Callable[[], nn.Module] = field(repr=False, compare=False)  # the network at the start, to distil from


@dataclass(frozen=True)
class Point:
    """One network of the size/accuracy curve."""

    cycle: int
    accuracy: float  # on the validation data
    mask_alive: int  # prunable weights that are not zero
    deployable_weights: int  # prunable weights of the dense network, zeros and all
    deployable_params: int  # all its parameters


@dataclass(frozen=True)
class State:
    """All that a run knows beside its tensors: plain data, on disk as JSON."""

    phase: str = "train"
    cycle: int = 1
    epoch: int = 0  # how many of this phase are done
    accuracy: float | None = None  # after the update before
    points: tuple[Point, ...] = ()
    candidate: int = 0  # for the last fine-tuning, from the smallest on
    structure: str = ""  # the file whose network has the present shapes; "" while they are those of the model given
    max_error: float = 0.0  # the largest of any squeeze, relative, in float64
    max_difference: float = 0.0  # the largest of any output, absolute, in the model's own dtype
    max_relative: float = 0.0  # the same, relative to the largest output
    seconds: float = 0.0


TrainEpoch = Callable[[nn.Module, Optimizer, Epoch], Any]
MakeOptimizer = Callable[[nn.Module, str], Optimizer]
Evaluate = Callable[[nn.Module], float]
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Result:
    """The network that came out, its summary, and every cycle's network as a point of the size/accuracy curve."""

    model: nn.Module
    summary: dict[str, Any]
    points: tuple[Point, ...]
    directory: RunDirectory = field(repr=False)
    origin: nn.Module = field(repr=False)

    def smallest(self, min_accuracy: float) -> Point | None:
        """The smallest network that is at least so accurate on the validation data."""
        return smallest(self.points, min_accuracy)

    def network(self, cycle: int) -> nn.Module:
        """The network as it was at the end of a cycle; 0 is the unpruned one."""
        return self.directory.load_network(self.origin, self.directory.network_name(cycle))


def smallest(points: tuple[Point, ...], min_accuracy: float) -> Point | None:
    return min((point for point in points if point.accuracy >= min_accuracy), key=size, default=None)


def size(point: Point) -> tuple[int, int]:
    return point.deployable_params, point.mask_alive
