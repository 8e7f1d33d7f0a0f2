"""The usual call in C++: `usual.cpp`, for small tensors, which wait for the host.

torch has no binary interface for autograd that outlives a release, so it is built here, for the torch that is there:
once, in half a minute, beside a program that goes on in Python meanwhile. What is built lies in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("usual.cpp")
NAME = "squeeze_release_usual"
_module: Any = None
_building: threading.Thread | None = None


def compiled() -> Any:
    """What was built; None until it is, and where it cannot be."""
    return _module


@functools.cache
def begin(then: Callable[[Any], None]) -> None:
    """Load it, or begin to build it: `then` gets it, in another thread if it had to be built."""
    global _building
    with contextlib.suppress(Exception):  # a cache that cannot be read: whatever it is, there is another way
        built = cache()
        if built.exists():
            try:
                return _take(built, then)
            except ImportError:  # it was made on another machine, say
                built.unlink(missing_ok=True)
        _building = threading.Thread(target=_build_and_take, args=(built, then), daemon=True)
        _building.start()


def wait() -> Any:
    """For who measures: what is there in the end."""
    if _building is not None:
        _building.join()
    return _module


def cache() -> Path:
    """Where it is, or will be, for this source, torch and Python."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "squeeze-release" / "kernels"
    versions = torch.__version__, torch.version.git_version, platform.machine(), platform.libc_ver()
    key = hashlib.sha256(repr((SOURCE.read_text(encoding="utf-8"), versions)).encode()).hexdigest()[:16]
    return folder / key / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(into: Path, *flags: str) -> None:
    """As a whole or not at all, and once, however many processes ask."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    root = Path(torch.__file__).parent
    headers = sysconfig.get_config_var("INCLUDEPY"), root / "include", root / "include/torch/csrc/api/include"
    command = [*compiler.split(), "-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC", *flags, SOURCE]
    for each in headers:
        command += ["-isystem", each]
    command += [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    # By a shell, which brings it to an end, and has the lock till then, if this process comes to its own meanwhile; a
    # nice one, for who else computes on the same cores.
    script = 'new="$0.new"; "$@" -o "$new" && mv "$new" "$0" || { rm -f "$new"; exit 1; }'
    into.parent.mkdir(parents=True, exist_ok=True)
    with _alone(into.parent) as lock, log_of(into).open("wb") as log:
        if not into.exists():
            subprocess.run(
                list(map(str, ["nice", "sh", "-c", script, into, *command])), check=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock],
            )  # fmt: skip


def log_of(built: Path) -> Path:
    """What the compiler said, for who wonders why it was not built."""
    return built.with_name("log")


def load(built: Path) -> Any:
    spec = spec_from_file_location(NAME, built)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_and_take(built: Path, then: Callable[[Any], None]) -> None:
    with contextlib.suppress(Exception):  # no compiler, no headers: whatever it is, there is another way
        build(built)
        _take(built, then)


def _take(built: Path, then: Callable[[Any], None]) -> None:
    global _module
    _module = load(built)
    then(_module)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    import fcntl  # not on Windows

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield lock.fileno()
        finally:  # for a process that was forked meanwhile has it too
            fcntl.flock(lock, fcntl.LOCK_UN)
