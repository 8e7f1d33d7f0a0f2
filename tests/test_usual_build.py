"""When and how `usual.cpp` is built, and that all goes on without it."""

from __future__ import annotations

import threading
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


@pytest.mark.parametrize("why", ["no compiler", "a compiler that fails", "a cache that is a file", "no library"])
def test_where_it_cannot_be_built(why: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(usual.shutil, "which", lambda name: None)
    elif why == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
    elif why == "a cache that is a file":
        fresh.parents[2].mkdir(parents=True, exist_ok=True)
        fresh.parents[1].write_text("")
    else:
        fresh.parent.mkdir(parents=True)
        fresh.write_text("not a library")
    usual.begin(lambda module: pytest.fail("nothing was built"))
    assert usual.wait() is None


def test_one_process_builds(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others wait for it, and find it."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    lines = f"echo built >> {log}", "sleep 0.3", 'while [ "$1" != -o ]; do shift; done', 'echo > "$2"'
    compiler.write_text("\n".join(["#!/bin/sh", *lines]))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: usual.build(fresh), range(4)))
    assert log.read_text() == "built\n" and {each.name for each in fresh.parent.iterdir()} == {"lock", fresh.name}


def test_another_torch_has_another(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert usual.cache() != fresh and usual.cache().name == fresh.name
