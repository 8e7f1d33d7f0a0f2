"""README and pages cannot rot: their Python runs, and what they say is printed is printed."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from squeeze_release import cli

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(\$ )?squeeze-release (.*)$", re.MULTILINE)  # with a prompt it is run


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if any(block[1] == language for block in FENCE.finditer(page.read_text("utf-8")))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the blocks of one page leave their files; modules that they write there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")  # Lightning's own, all three
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*GPU available but not used.*")
@pytest.mark.parametrize("page", with_blocks("python"), ids=lambda page: page.name)
def test_python_blocks_run_and_print_the_text_blocks_that_follow_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "readme"}
    printed = None
    for block in FENCE.finditer(text):
        language, body = block.groups()
        if language == "python":
            line = text.count("\n", 0, block.start(2))
            code = compile("\n" * line + body, str(page), "exec")  # tracebacks name the page's own lines
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(code, namespace)
            printed = stdout.getvalue()
        elif language == "console":
            for prompt, command in COMMAND.findall(body):
                if prompt:
                    done = CliRunner().invoke(cli.app, shlex.split(command, comments=True), catch_exceptions=False)
                    assert done.exit_code == 0, done.output
        elif language == "text":
            assert printed is not None, "a ```text block shows what the ```python block before it prints"
            assert _comparable(printed) == _comparable(body)
            printed = None


def _comparable(text: str) -> list[str]:
    """Without what differs between two runs: seconds, digits of errors that are rounding alone, and spacing."""
    text = re.sub(r"\d\.\de-\d\d", "<rounding>", text)
    text = re.sub(r"\d+\.\d s\b", "<seconds>", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", with_blocks("console"), ids=lambda page: page.name)
def test_commands_have_the_arguments_that_they_are_shown_with(page: Path) -> None:
    """Those too that take a large model or hours, and are not run."""
    group = typer.main.get_command(cli.app)
    for _, body in FENCE.findall(page.read_text(encoding="utf-8")):
        for _, line in COMMAND.findall(body):
            name, *arguments = shlex.split(line, comments=True)
            command = group.commands[name]  # type: ignore[attr-defined]
            with command.make_context(name, arguments):
                pass


def test_the_first_example_of_the_readme_has_ten_lines() -> None:
    first = FENCE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None and first[1] == "python"
    assert len([line for line in first[2].splitlines() if line.strip()]) == 10
