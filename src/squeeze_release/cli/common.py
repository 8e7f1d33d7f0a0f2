"""What several commands share: their arguments, and where their words go."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from ..analyse import RULE_SETS
from ..errors import InputError
from ..rehearse import Call
from . import checkpoints, inputs, models

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=models.HELP, autocompletion=models.complete)]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=checkpoints.HELP)]
InputOption = Annotated[list[str], typer.Option("--input", metavar="SHAPE", help=inputs.HELP)]
Rules = Enum("Rules", {name: name for name in RULE_SETS})  # type: ignore[misc]
ALL_RULES = Rules("all")
RulesOption = Annotated[Rules, typer.Option(help="what squeezing may do: the paper's A, AB and paper, or all")]
Compaction = Enum("Compaction", {"index": "index"})
CompactionOption = Annotated[
    Compaction | None, typer.Option(help="let layers gather and place: smaller, not always faster")
]
KeepOption = Annotated[list[str] | None, typer.Option(metavar="NAME", help="a module whose width must not change")]
Dtype = Enum("Dtype", {name: name for name in inputs.FLOATS})  # type: ignore[misc]
DtypeOption = Annotated[Dtype | None, typer.Option(help="convert the model; by default it stays as it is built")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else, to stdout")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="print nothing but errors")]


def network_and_call(
    model: str, checkpoint: Path, shapes: list[str], dtype: Enum | None, speaker: Speaker
) -> tuple[nn.Module, Call]:
    """The model with its weights in eval mode, and an example of its inputs."""
    specs = inputs.parse(shapes)
    speaker.progress(f"building {model}")
    network = models.build(model)
    speaker.progress(f"reading {checkpoint}")
    wanted = None if dtype is None else getattr(torch, dtype.value)
    network = network.to(wanted)  # before there are weights, so that none is rounded on the way
    network = checkpoints.with_weights(network, str(checkpoint)).eval().to(wanted)  # one of ours has a dtype of its own
    floats = (p.dtype for p in network.parameters() if p.is_floating_point())
    return network, inputs.draw(specs, network, next(floats, torch.get_default_dtype()))


class Speaker:
    """Results to stdout, progress to stderr."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._json, self._quiet = as_json, quiet
        self._stderr = Console(stderr=True, highlight=False)

    def progress(self, text: str) -> None:
        if not self._quiet:
            self._stderr.print(text, style="dim", markup=False)

    def result(self, shown: object, data: dict[str, Any]) -> None:
        """For people, or for programs."""
        if self._json:
            print(json.dumps(data, indent=2))
        elif not self._quiet:
            print(shown)


def check_output(path: Path | None, option: str, suffix: str | None = None) -> None:
    """Before anything takes time: may a file go there?"""
    if path is None:
        return
    if suffix is not None and path.suffix != suffix:
        raise typer.BadParameter(f"{str(path)!r} does not end with {suffix}", param_hint=option)
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(
            f"{str(path)!r} cannot be a file" if path.is_dir() else f"there is no folder {str(path.parent)!r}",
            where=option,
            consequence="nothing was done",
            remedy="name a file in a folder that is there",
        )


def write_page(path: Path, **contents: Any) -> None:
    """The HTML page, by whoever writes it."""
    try:
        page: Any = importlib.import_module("squeeze_release.page")
    except ModuleNotFoundError as missing:
        raise InputError(
            "this installation has no report page",
            where=str(path),
            consequence="no page was written",
            remedy="install a version of squeeze-release that has squeeze_release.page",
        ) from missing
    page.write_page(path, command=shlex.join(["squeeze-release", *sys.argv[1:]]), **contents)
