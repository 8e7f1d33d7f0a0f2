"""What a person sees of a run: bars in a terminal, lines elsewhere, curves in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_NAMES = {"train": "training", "prune": "pruning", "finetune": "fine-tuning", "final": "last fine-tuning"}


class Bars:
    """A listener that draws: a bar for the phase, with accuracy and weights alive, and a line for every cycle.

        with Bars() as bars:
            sr.cycle(..., listeners=[bars])

    Where there is no terminal, as in CI, only the lines are printed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        columns = (
            TextColumn("{task.description:24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self._task = self._progress.add_task("", total=None, news="")
        self._phase: tuple[int, str] | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        if line["event"] == "epoch":
            self._draw(line)
        elif line["event"] == "cycle":
            self._progress.console.print(
                f"cycle {line['cycle']:>3}   validation {line['accuracy']:.2%}   "
                f"{line['deployable_weights']:>11,} weights   {line['deployable_params']:>11,} parameters   "
                f"{line['mask_alive']:>11,} not zero",
                highlight=False,
                soft_wrap=True,
            )

    def _draw(self, line: dict[str, Any]) -> None:
        phase = (line["cycle"], line["phase"])
        name = f"cycle {line['cycle']}, {_NAMES[line['phase']]}" if line["phase"] != "train" else "training"
        if phase != self._phase:
            self._phase = phase
            self._progress.reset(self._task, total=line["epochs"], description=name)
        news = f"{line['accuracy']:.2%}  {line['alive']:,} of {line['weights']:,} alive"
        self._progress.update(self._task, completed=line["epoch"], news=news)


class TensorBoard:
    """A listener that writes accuracy, weights alive and sizes for TensorBoard, against the epochs of the whole run."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        self._epochs = 0

    def __call__(self, line: dict[str, Any]) -> None:
        self._epochs += line["event"] == "epoch"
        names = ("accuracy", "alive", "mask_alive", "deployable_weights", "deployable_params", "max_error", "seconds")
        for name in names:
            if name in line:
                self._writer.add_scalar(f"{line['event']}/{name}", line[name], self._epochs)
        self._writer.flush()
