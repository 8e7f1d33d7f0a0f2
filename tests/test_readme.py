"""README and pages cannot rot: their Python runs, and what they say is printed is printed."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIGHTNINGS_OWN = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "cycle.md",
    pytest.param(ROOT / "docs" / "callbacks.md", marks=LIGHTNINGS_OWN),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_the_text_blocks_that_follow_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    namespace: dict[str, Any] = {"__name__": "readme"}
    printed = None
    ran = 0
    for block in blocks:
        language, body = block.groups()
        if language == "python":
            line = text.count("\n", 0, block.start(2))
            code = compile("\n" * line + body, str(page), "exec")  # tracebacks name the page's own lines
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(code, namespace)
            printed = stdout.getvalue()
            ran += 1
        elif language == "text":
            assert printed is not None, "a ```text block shows what the ```python block before it prints"
            assert _comparable(printed) == _comparable(body)
            printed = None
    assert ran


def _comparable(text: str) -> list[str]:
    """Without what differs between two runs: seconds, digits of errors that are rounding alone, and spacing."""
    text = re.sub(r"\d\.\de-\d\d", "<rounding>", text)
    text = re.sub(r"\d+\.\d s\b", "<seconds>", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
