"""When and how `usual.cpp` is built, and that all goes on without it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from squeeze_release.modules.kernels import usual


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has not asked yet, with an empty cache."""
    monkeypatch.setattr(usual, "_module", None)
    monkeypatch.setattr(usual, "_building", None)
    monkeypatch.setattr(usual, "begin", usual.begin.__wrapped__)  # which is asked once otherwise
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return usual.cache()


def test_it_is_built_beside_and_found_again(fresh: Path, in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, taken = threading.Event(), []

    def build(into: Path) -> None:
        may_end.wait()
        into.parent.mkdir(parents=True)
        into.write_bytes(Path(in_cpp.__file__).read_bytes())

    monkeypatch.setattr(usual, "build", build)
    usual.begin(taken.append)
    assert usual.compiled() is None and not taken
    may_end.set()
    assert usual.wait() is usual.compiled() is taken[0]
    monkeypatch.setattr(usual, "build", None)
    usual.begin(taken.append)
    assert len(taken) == 2 and usual.compiled() is taken[1]


@pytest.mark.parametrize("why", ["no compiler", "a compiler that fails", "a cache that is a file"])
def test_where_it_cannot_be_built(why: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(usual.shutil, "which", lambda name: None)
    elif why == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
    else:
        fresh.parents[2].mkdir(parents=True, exist_ok=True)
        fresh.parents[1].write_text("")
    usual.begin(lambda module: pytest.fail("nothing was built"))
    assert usual.wait() is None


class Compiler:
    """It notes that it was called, and writes something when it is let."""

    def __init__(self, folder: Path) -> None:
        self.called, self.may_end, self.program = (folder / name for name in ("called", "may_end", "program"))
        wait = f"while [ ! -e {self.may_end} ]; do sleep 0.05; done"
        lines = f"echo called >> {self.called}", wait, 'while [ "$1" != -o ]; do shift; done', 'echo > "$2"'
        self.program.write_text("\n".join(["#!/bin/sh", *lines]))
        self.program.chmod(0o755)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.program))
    yield made
    made.may_end.touch()


def until_it_is_there(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_process_builds(fresh: Path, compiler: Compiler) -> None:
    """Others wait for it, and find it."""
    with ThreadPoolExecutor(4) as pool:
        building = [pool.submit(usual.build, fresh) for _ in range(4)]
        until_it_is_there(compiler.called)
        compiler.may_end.touch()
        for each in building:
            each.result()
    assert compiler.called.read_text() == "called\n"
    assert {each.name for each in fresh.parent.iterdir()} == {"lock", "log", fresh.name}


def test_a_process_that_ends_before_it_is_built(fresh: Path, compiler: Compiler) -> None:
    """The next one has it."""
    script = (
        "import os, time; from squeeze_release.modules.kernels import usual; usual.begin(print)\n"
        f"while not os.path.exists({str(compiler.called)!r}): time.sleep(0.01)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not fresh.exists()
    compiler.may_end.touch()
    until_it_is_there(fresh)
    assert {each.name for each in fresh.parent.iterdir()} == {"lock", "log", fresh.name}


def test_nothing_is_left_of_what_failed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(subprocess.CalledProcessError):
        usual.build(fresh)
    assert {each.name for each in fresh.parent.iterdir()} == {"lock", "log"}


def test_what_cannot_be_loaded_is_built_again(fresh: Path, in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(into: Path) -> None:
        into.write_bytes(Path(in_cpp.__file__).read_bytes())

    fresh.parent.mkdir(parents=True)
    fresh.write_text("not a library")
    monkeypatch.setattr(usual, "build", build)
    usual.begin(lambda module: None)
    assert usual.wait() is not None


def test_why_it_was_not_built(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("what is this?")
    monkeypatch.setattr(usual, "SOURCE", broken)
    with pytest.raises(subprocess.CalledProcessError):
        usual.build(fresh)
    assert "what" in usual.log_of(fresh).read_text()


def test_another_torch_has_another(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert usual.cache() != fresh and usual.cache().name == fresh.name
