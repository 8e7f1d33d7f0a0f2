"""Where a page was written. No paths, no names of users or machines: pages are passed on."""

from __future__ import annotations

import platform
import re

import torch

_START = r"(?<![\w.~/\\:-])(?:~?/|[A-Za-z]:[\\/]|\\\\)"
_PLAIN = re.compile(_START + r"(?:[^\s'\"=,:/\\]+[\\/])*([^\s'\"=,:/\\]*)")
_QUOTED = re.compile(_START + r"(?:[^/\\]*[\\/])*([^/\\]*)")  # where spaces may be part of it
_QUOTES = re.compile(r"""('[^']*'|"[^"]*")""")


def environment() -> dict[str, str]:
    from .. import __version__

    return {
        "squeeze-release": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }


def without_paths(command: str) -> str:
    """Of absolute paths only the last part: the rest tells who ran it, and where.

    >>> without_paths("squeeze-release run fc-mnist --data /home/ada/mnist --run-dir=runs/fc")
    'squeeze-release run fc-mnist --data …/mnist --run-dir=runs/fc'
    """
    parts = _QUOTES.split(command)  # every second one is quoted
    return "".join(
        (_QUOTED if place % 2 else _PLAIN).sub(lambda found: f"…/{found[1]}", part) for place, part in enumerate(parts)
    )
