"""The command line: `squeeze-release`. One file a command."""

from __future__ import annotations

import sys

import typer

from ..errors import SqueezeError
from .run import run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(run)


@app.callback()
def _squeeze_release() -> None:
    """Make pruned networks really smaller, without changing what they compute."""


def main() -> None:
    """Errors on purpose print as they are and end with 1; wrong arguments end with 2."""
    try:
        app()
    except SqueezeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
