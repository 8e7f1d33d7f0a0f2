"""`squeeze-release demo`: two small networks from training to squeezed."""

from __future__ import annotations

import typer


def demo() -> None:
    """Train, prune and squeeze two small networks on the digits inside scikit-learn: a minute.

    [bold]squeeze-release demo[/bold]

    Ends with 0, or with 1 where scikit-learn is not installed.
    """
    from ..demo import main

    raise typer.Exit(main())
