"""`squeeze-release run`: a recipe, from training to the small network."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import recipes
from ..cycle import Bars, TensorBoard
from ..cycle.config import MODES, Config
from ..errors import InputError
from ..recipes.launch import Launch

Recipe = Enum("Recipe", {name: name for name in recipes.RECIPES})  # type: ignore[misc]
Mode = Enum("Mode", {mode: mode for mode in MODES})  # type: ignore[misc]
_CYCLE = Mode("squeeze-release")


def run(
    recipe: Annotated[Recipe, typer.Argument(help="which one")],
    preset: Annotated[str, typer.Option(help="paper, best, quick, or short where there is one")] = "quick",
    seed: Annotated[int, typer.Option()] = 0,
    data: Annotated[
        Path | None, typer.Option(help="the folder with the data; else it is looked for in the cache")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="where all files of the run go")] = None,
    mode: Annotated[Mode, typer.Option(help="the cycle, or one mask that accumulates")] = _CYCLE,
    rules: Annotated[str | None, typer.Option(help="what squeezing may do: A, AB, paper or all")] = None,
    start: Annotated[Path | None, typer.Option(help="a safetensors checkpoint to start from")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")] = False,
    stop_after: Annotated[
        float | None, typer.Option(help="seconds, after which all is saved for --resume; ends with 3")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="change the preset: --set prune_epochs=20")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="curves for TensorBoard in --run-dir")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="only the summary, as JSON")] = False,
) -> None:
    """Train a network, and prune, squeeze, release and fine-tune it until it can take no more.

    [bold]squeeze-release run fc-mnist --preset quick --data DIR --run-dir runs/fc[/bold]

    Under `accelerate launch` or `torchrun` all devices take part.
    """
    chosen = recipes.load(recipe.value)
    if preset not in chosen.PRESETS:
        raise InputError(
            f"{recipe.value} has no preset {preset!r}",
            where="--preset",
            consequence="no run was started",
            remedy=f"use one of {', '.join(chosen.PRESETS)}",
        )
    accelerator = _accelerator()
    listeners: list[Any] = []
    with contextlib.ExitStack() as stack:
        if not quiet:
            listeners.append(stack.enter_context(Bars(Console(stderr=True))))
        if tensorboard:
            listeners.append(TensorBoard(run_dir or Path()))
        launch = Launch(
            seed,
            mode.value,
            rules,
            data,
            start,
            run_dir,
            resume,
            listeners,
            accelerator,
            _changes(changes or []),
            stop_after,
        )
        result = chosen.run(preset, launch)
    if accelerator is None or accelerator.is_main_process:
        print(json.dumps(result.summary, indent=2))


def _changes(texts: list[str]) -> tuple[tuple[str, Any], ...]:
    """`name=value`, the value as JSON, or as text where it is none."""
    known = {field.name for field in dataclasses.fields(Config)}
    found: list[tuple[str, Any]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name in ("seed", "mode", "rules"):
            raise InputError(
                f"{name} is an option of its own",
                where="--set",
                consequence="no run was started",
                remedy=f"use --{name} {value}",
            )
        if name not in known or not equals:
            raise InputError(
                f"{text!r} changes nothing",
                where="--set",
                consequence="no run was started",
                remedy=f"use NAME=VALUE, NAME one of {', '.join(sorted(known))}",
            )
        try:
            found.append((name, json.loads(value)))
        except json.JSONDecodeError:
            found.append((name, value))
    return tuple(found)


def _accelerator() -> Any:
    """Accelerate's, where there is more than one process or a GPU; a lone CPU needs none."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.cuda.is_available():
        return None
    try:
        from accelerate import Accelerator
    except ModuleNotFoundError as missing:
        raise InputError(
            "accelerate is not installed",
            where="squeeze-release run, on a GPU or on several processes",
            consequence="no run was started",
            remedy="pip install 'squeeze-release[recipes]'",
        ) from missing
    return Accelerator()
