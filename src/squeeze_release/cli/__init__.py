"""The command line: `squeeze-release`. One file a command."""

from __future__ import annotations

import sys

import typer

from ..errors import RunStopped, SqueezeError
from .bench import bench
from .demo import demo
from .inspect import inspect
from .report import report
from .run import run
from .squeeze import squeeze

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
for _command in (squeeze, inspect, bench, run, report, demo):
    app.command()(_command)


@app.callback()
def _squeeze_release() -> None:
    """Make pruned networks really smaller, without changing what they compute.

    Every command ends with 0 when all went well, 1 after an error (which says what to do about it), 2 for wrong
    arguments, and 3 for a run that has used up its time and can be resumed. Results go to stdout, progress to stderr.
    """


def main() -> None:
    """Errors on purpose print as they are and end with 1, and so do files that cannot be written."""
    try:
        app()
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(3)
    except (SqueezeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
