"""`squeeze-release report`: the HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .common import QuietOption, Speaker, check_output, write_page


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the folder that `run --run-dir` wrote")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the page: one HTML file that needs nothing else")],
    quiet: QuietOption = False,
) -> None:
    """Write the page about a run: how small, how exact, how accurate, cycle by cycle and layer by layer.

    [bold]squeeze-release report runs/fc -o fc.html[/bold]

    Ends with 0, 1 after an error (which says what to do), 2 for wrong arguments.
    """
    if not run_dir.is_dir():
        raise InputError(
            f"there is no folder {str(run_dir)!r}",
            where="RUN_DIR",
            consequence="no page was written",
            remedy="name the folder of a run: squeeze-release run RECIPE --run-dir DIR",
        )
    check_output(out, "--out")
    write_page(out, run_dir=run_dir)
    Speaker(as_json=False, quiet=quiet).progress(f"wrote {out}")
