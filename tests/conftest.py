"""What every test shares: one thread a worker, fixed seeds, and a torchvision that imports beside a CPU torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: two workers must not fight over two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from squeeze_release.modules.kernels import native

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")  # the same cases on every run; `make fuzz` is where new ones are looked for

_torchvision_ops: torch.library.Library | None = None  # the definitions live exactly as long as this object


def make_torchvision_importable() -> None:
    """Define the two operators that torchvision's Python code registers against, if its binary did not bring them.

    The wheel is built for a CUDA torch, so beside a CPU torch its extension does not load, and the import stops at
    "operator torchvision::nms does not exist". The models need none of these operators.
    """
    global _torchvision_ops
    try:
        import torchvision
    except ModuleNotFoundError:
        return  # not installed: the tests that want it say so themselves
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _torchvision_ops = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _torchvision_ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


make_torchvision_importable()

native.OFTEN = 0  # never: tests say themselves where C++ is to be built

# They go first, longest first: at the end one of two workers would wait for the other.
_LONG = (
    "test_convnext",
    "test_cycle",
    "test_vit",
    "test_resnet",
    "test_transformers",
    "test_inplace",
    "test_fuzz",
    "test_attention_written",
    "test_channels",
    "test_export",
    "test_new_user",
    "test_compaction",
    "test_store",
    "test_recipes",
    "test_readme",
    "test_ranks",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(item.path.stem) if item.path.stem in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bits depend on how many threads share a sum, and seconds on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def kernels_asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a kernel took it, for each time that CompensatedLayerNorm asked for one."""
    from squeeze_release.modules.kernels import shortest

    asked: list[bool] = []
    real = shortest.normalize

    def normalize(*arguments: Any) -> torch.Tensor | None:
        out = real(*arguments)
        asked.append(out is not None)
        return out

    monkeypatch.setattr(shortest, "normalize", normalize)
    return asked


@pytest.fixture(scope="session")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`usual.cpp`, with warnings as errors; built once for all processes of a run."""
    from squeeze_release.modules.kernels import usual

    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    built = folder / "usual" / usual.cache().name
    try:
        usual.build(built, "-O1", "-Wall", "-Wextra", "-Werror")
    except subprocess.CalledProcessError:
        pytest.fail(usual.log_of(built).read_text())
    return usual.load(built)


@pytest.fixture(params=["Python", "C++"])
def called_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who calls kernels, for as long as a test runs: it was built before, or it cannot be."""
    from squeeze_release.modules.kernels import shortest, usual

    in_cpp = request.getfixturevalue("in_cpp") if request.param == "C++" else None
    normalize = shortest._normalize if in_cpp is None else in_cpp.normalize_with(vars(shortest))
    monkeypatch.setattr(shortest, "normalize", normalize)
    monkeypatch.setattr(usual, "begin", lambda then: None)  # it has begun, and ended
    monkeypatch.setattr(usual, "compiled", lambda: in_cpp)
    shortest.forget()
    yield request.param
    shortest.forget()


@pytest.fixture
def plain(in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """C++, and kernels for a CPU in plain torch."""
    from plain_kernels import Plain

    from squeeze_release.modules.kernels import shortest, usual

    monkeypatch.setattr(usual, "compiled", lambda: in_cpp)
    shortest.forget()
    yield Plain(monkeypatch)
    shortest.forget()
