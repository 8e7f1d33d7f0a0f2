"""What the callbacks of all loops are given, and what they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cycle import Config, Point
from ..cycle.config import Listener
from .checks import check_config, check_metric
from .guest import Guest
from .inputs import Watch
from .resume import Resumed


class Host:
    """Holds the guest while there is one; a callback adds when the loop calls it."""

    def __init__(
        self,
        config: Config,
        metric: str,
        example_inputs: Any,
        run_dir: str | Path | None,
        listeners: Sequence[Listener],
    ) -> None:
        check_config(config)
        check_metric(metric)
        self.config, self.metric, self.example_inputs = config, metric, example_inputs
        self.run_dir, self.listeners = run_dir, listeners
        self.summary: dict[str, Any] | None = None
        self._guest: Guest | None = None
        self._resumed: Resumed | None = None
        self._watch: Watch | None = None

    @property
    def points(self) -> tuple[Point, ...]:
        """Every cycle's network as a point of the size/accuracy curve."""
        return self._guest.state.points if self._guest else ()
