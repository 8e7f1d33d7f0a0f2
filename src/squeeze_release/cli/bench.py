"""`squeeze-release bench`: the masked network and the small one, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..bench import bench as measure
from ..squeeze import squeeze
from ..store import load
from . import models
from .common import (
    CheckpointArgument,
    DtypeOption,
    InputOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    Speaker,
    network_and_call,
)


def bench(
    model: ModelArgument,
    checkpoint: CheckpointArgument,
    input: InputOption,
    small: Annotated[Path | None, typer.Option(help="what `squeeze` wrote; else it is made first")] = None,
    device: Annotated[list[str] | None, typer.Option(help="by default cpu, and cuda where there is one")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of the CPU; torch's choice by default")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="for each network, device and size of the batch")] = 2.0,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time the masked network and the small one: at the batch of --input and at 1, on the CPU and on a GPU.

    [bold]squeeze-release bench timm:convnext_tiny pruned.pt --input 16x3x224x224 --small small.safetensors[/bold]

    Medians of many calls, taking turns, with their quartiles.

    Ends with 0, 1 after an error (which says what to do), 2 for wrong arguments.
    """
    speaker = Speaker(as_json=as_json, quiet=quiet)
    devices = [_device(name) for name in device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]]
    if threads is not None:
        torch.set_num_threads(threads)
    network, (args, kwargs) = network_and_call(model, checkpoint, input, dtype, speaker)
    if small is not None:
        speaker.progress(f"reading {small}")
        narrow = load(models.build(model).eval(), small)
        narrow = narrow if dtype is None else narrow.to(getattr(torch, dtype.value))
    else:
        speaker.progress("squeezing")
        narrow = squeeze(network, args, kwargs, verify=False).model
    found = []
    for where in devices:
        speaker.progress(f"measuring on {where}")
        found.append(measure({"masked": network, "squeezed": narrow}, args, kwargs, device=where, seconds=seconds))
    speaker.result("\n".join(map(str, found)), {"benches": [each.to_dict() for each in found]})


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"{name!r}: {str(error).splitlines()[0]}", param_hint="--device") from error
    return device
