"""Pruning: which weights matter least, and exact zeros in their place.

    targets = find_targets(model)                     what may go, and in which units
    masks = Masks(model, targets)
    optimizer.register_step_post_hook(masks.keep)     what is zero stays zero
    ...                                               train
    masks.prune(gradient_times_weight(model), keep=0.2)

Scores are functions that return one number a weight, schedules are functions of the progress from 0 to 1.
"""

from .channel_masks import ChannelMasks
from .channels import Channels
from .masks import Masks
from .schedules import constant, cubic, linear
from .scores import AveragedScores, gradient_times_weight, magnitude, random, snip, synflow, toward_dead_units
from .targets import Target, find_targets
from .trial import find_channels

__all__ = [
    "AveragedScores",
    "ChannelMasks",
    "Channels",
    "Masks",
    "Target",
    "constant",
    "cubic",
    "find_channels",
    "find_targets",
    "gradient_times_weight",
    "linear",
    "magnitude",
    "random",
    "snip",
    "synflow",
    "toward_dead_units",
]
