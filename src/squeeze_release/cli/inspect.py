"""`squeeze-release inspect`: what squeezing would do, and why each layer is as wide as it is."""

from __future__ import annotations

from ..inspection import inspect as inspect_model
from .common import (
    ALL_RULES,
    CheckpointArgument,
    CompactionOption,
    InputOption,
    JsonOption,
    KeepOption,
    ModelArgument,
    QuietOption,
    RulesOption,
    Speaker,
    network_and_call,
)


def inspect(
    model: ModelArgument,
    checkpoint: CheckpointArgument,
    input: InputOption,
    rules: RulesOption = ALL_RULES,
    compaction: CompactionOption = None,
    keep: KeepOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what squeezing would make of a checkpoint, and why each layer is as wide as it is.

    [bold]squeeze-release inspect torchvision:resnet18 pruned.pt --input 1x3x224x224[/bold]

    Nothing is written. Ends with 0, 1 after an error (which says what to do), 2 for wrong arguments.
    """
    speaker = Speaker(as_json=as_json, quiet=quiet)
    network, (args, kwargs) = network_and_call(model, checkpoint, input, None, speaker)
    speaker.progress("looking")
    method = None if compaction is None else compaction.value
    found = inspect_model(network, args, kwargs, keep=keep or [], rules=rules.value, compaction=method)
    speaker.result(found, found.to_dict())
