"""The usual call in C: `usual.c`, for small tensors, which wait for the host.

After a backward, which another thread runs, all that Python touches is new to a processor again, and C touches less.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def compiled() -> Any:
    """Built as Triton builds what it launches with itself; None where it cannot be."""
    try:
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_name("usual.c").read_text(encoding="utf-8")
        return compile_module_from_src(src=source, name="squeeze_release_usual")
    except Exception:  # no Triton, no compiler, another interface: whatever it is, there is another way
        return None
