"""How a kernel is launched again, by `usual.cpp`, with a driver that notes what it is told; what is checked before."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_kernels import Driver
from torch import Tensor

from squeeze_release.modules.kernels import launch
from squeeze_release.modules.kernels.inputs import GONE

PTX = """
.version 8.7
.target sm_90a
.visible .entry forward(
	.param .u64 .ptr .global .align 1 forward_param_0,
	.param .u64 .ptr .global .align 1 forward_param_1,
	.param .u32 forward_param_2,
	.param .f32 forward_param_3,
	.param .u64 .ptr .global .align 1 forward_param_4
)
.reqntid 128
{
	.param .b64 elsewhere;
}
"""
F32 = torch.float32
FUNCTION, THREADS, SHARED = 0x1234, 128, 48

# ------------------------------------------------------------------------------------------------ what Triton has made


def compiled(ptx: str = PTX, **metadata: Any) -> SimpleNamespace:
    """As Triton hands it over."""
    usual = {"num_warps": 4, "shared": 32, "global_scratch_size": 0, "profile_scratch_size": 0}
    usual |= {"launch_cooperative_grid": False, "launch_pdl": False, "num_ctas": 1} | metadata
    return SimpleNamespace(metadata=SimpleNamespace(**usual), asm={"ptx": ptx}, function=99)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_driver", lambda: 7)


def test_parameters_are_read_from_the_kernel() -> None:
    assert launch.parameter_bits(PTX) == [64, 64, 32, 32, 64]


@pytest.mark.usefixtures("driver")
def test_what_the_driver_is_told() -> None:
    assert launch.known(compiled(), 2, 2) == launch.Known(7, 99, 128, 32, 1)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "metadata", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch_pdl": True}, {"num_ctas": 2}]
)
def test_a_kernel_that_wants_more_is_not_known(metadata: dict[str, Any]) -> None:
    assert launch.known(compiled(**metadata), 2, 2) is None


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "other",
    [
        PTX.replace(".u32 forward_param_2", ".u64 forward_param_2"),
        PTX.replace(".param .f32 forward_param_3,", "").replace(
            ".param .u64 .ptr .global .align 1 forward_param_4", ""
        ),
        "not assembly",
    ],
    ids=["a number of 64 bits", "fewer", "none"],
)
def test_a_kernel_of_other_parameters_is_not_known(other: str) -> None:
    assert launch.known(compiled(other), 2, 2) is None


@pytest.mark.usefixtures("driver")
def test_a_kernel_that_another_thread_is_still_loading_is_not_known() -> None:
    found = compiled()
    found.function = None
    assert launch.known(found, 2, 2) is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(launch, "_driver", missing)
    assert launch.known(compiled(), 2, 2) is None


# -------------------------------------------------------------------------------------------------------- the short way


class Notes:
    """What a kernel of some pointers, integers, numbers and hidden pointers is told."""

    def __init__(self, types: str) -> None:
        self.types, self.calls, self.answer = types, [], 0
        self.at = (driver := Driver(self._launch)).at
        self._driver = driver

    def _launch(self, function: int, shape: list[int], stream: int | None, told: Callable[[str], list[Any]]) -> int:
        self.calls.append((function, shape, stream, told(self.types)))
        return self.answer


class Long:
    """The long way: what it was called with."""

    def __init__(self, alone: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.alone, self.y = alone, torch.zeros(4, 8)

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.y if self.alone else (self.y, None)


def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


CPU = torch.device("cpu")
Y, STATS = ((4, 8), (8, 1), F32), ((4, 2), (2, 1), F32)
NUMBERS = (0.5, -2.0)


class Way:
    """A launch that knows its kernel: two tensors are read and two filled, then two integers and two numbers."""

    def __init__(self, in_cpp: Any, outputs: Any = (Y, STATS), alone: bool = False) -> None:
        self.driver, self.long = Notes("ppppiiffp"), Long(alone)
        self.launch = in_cpp.Launch(outputs, (5, -6), (11, 12), CPU)
        self.run = in_cpp.Way(self.launch, self.long, alone)

    def known(self) -> Way:
        self.launch.know(self.driver.at, FUNCTION, THREADS, SHARED, 1)
        return self

    def took_the_long_way(self, *arguments: Any) -> bool:
        before = len(self.long.calls)
        y, nothing = self.run(*arguments)
        if len(self.long.calls) == before:
            return False
        assert y is self.long.y and nothing is None
        return True


@pytest.fixture
def way(in_cpp: Any) -> Way:
    return Way(in_cpp).known()


def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(8)


def test_what_the_kernel_is_told(way: Way) -> None:
    x, weight = tensors()
    y, stats = way.run(x, weight, NUMBERS)
    assert (y.shape, stats.shape) == ((4, 8), (4, 2))
    addresses = [each.data_ptr() for each in (x, weight, y, stats)]
    assert way.driver.calls == [
        (FUNCTION, [11, 12, 1, THREADS, 1, 1, SHARED], None, [*addresses, 5, -6, 0.5, -2.0, 0]),
    ]
    assert not way.long.calls


def test_what_is_missing_is_where_the_first_is(in_cpp: Any) -> None:
    way, (x, _) = Way(in_cpp, (Y, None)).known(), tensors()
    y, nothing = way.run(x, None, NUMBERS)
    assert nothing is None
    assert way.driver.calls[0][-1][:4] == [x.data_ptr(), x.data_ptr(), y.data_ptr(), x.data_ptr()]


def test_outputs_are_as_asked(in_cpp: Any) -> None:
    half = ((2, 3, 4), (24, 1, 6), torch.bfloat16)
    y, _ = Way(in_cpp, (half, STATS)).known().run(*tensors(), NUMBERS)
    assert (y.shape, y.stride(), y.dtype) == half and not y.requires_grad


def test_one_output_alone(in_cpp: Any) -> None:
    way, (x, weight) = Way(in_cpp, (Y, None), alone=True).known(), tensors()
    assert way.run(x, weight, NUMBERS).shape == (4, 8) and not way.long.calls
    assert way.run(x, torch.randn(9)[1:], NUMBERS) is way.long.y


def test_a_kernel_that_has_not_run_takes_the_long_way(in_cpp: Any) -> None:
    way, (x, weight) = Way(in_cpp), tensors()
    assert way.took_the_long_way(x, weight, NUMBERS)
    ((*read, last),) = way.long.calls
    assert read[0] is x and read[1] is weight and last == NUMBERS and not way.driver.calls
    assert not way.known().took_the_long_way(x, weight, NUMBERS) and len(way.driver.calls) == 1


@pytest.mark.parametrize("why", ["not aligned", "memory is gone", "it was not launched", "no first"])
def test_other_tensors_take_the_long_way(why: str, way: Way) -> None:
    x, weight = tensors()
    if why == "not aligned":
        weight = torch.randn(9)[1:]
    if why == "memory is gone":
        weight.untyped_storage().resize_(0)
    way.driver.answer = 201 * (why == "it was not launched")  # a thread has no context before it uses CUDA
    assert way.took_the_long_way(None if why == "no first" else x, weight, NUMBERS)
    assert len(way.driver.calls) == (why == "it was not launched")


def test_more_parameters_than_there_is_room_for(way: Way) -> None:
    assert way.took_the_long_way(*tensors(), (0.0,) * 40)
    assert way.took_the_long_way(*[torch.randn(4)] * 40, (0.0,))


def test_errors_are_handed_on(in_cpp: Any, way: Way) -> None:
    x, weight = tensors()
    for wrong in ((), (x, "weight", NUMBERS), (x, weight), (x, weight, ("0.5", -2.0))):
        with pytest.raises((TypeError, RuntimeError)):
            way.run(*wrong)

    def fails(*arguments: Any) -> Any:
        raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        in_cpp.Way(in_cpp.Launch((Y,), (), (1, 1), CPU), fails, True)(x, ())
    large = ((2**40, 2**10), (2**10, 1), F32)
    with pytest.raises(RuntimeError, match="memory"):
        Way(in_cpp, (large, None)).known().run(x, weight, NUMBERS)
    with pytest.raises(TypeError):
        in_cpp.Launch([1], (), (1, 1), CPU)


def test_nothing_is_kept(in_cpp: Any) -> None:
    """One reference too many would keep a tensor for ever, one too few end the process."""
    way, (x, weight) = Way(in_cpp).known(), tensors()
    counted = x, weight, NUMBERS, way.long, way.long.y, Y, STATS

    def run() -> None:
        way.run(x, weight, NUMBERS)
        way.run(x, None, NUMBERS)
        way.run(x, torch.randn(9)[1:], NUMBERS)
        way.driver.answer = 1
        way.run(x, weight, NUMBERS)
        way.driver.answer = 0
        way.driver.calls.clear(), way.long.calls.clear()

    run()
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        run()
    assert [sys.getrefcount(each) for each in counted] == before


# --------------------------------------------------------------------------------------------------------- the long way


class Kernel:
    """Triton's part: it fills what it is given, and what it has compiled is known at once."""

    def __init__(self) -> None:
        self.known: launch.Known | None = None
        self.asked, self.driver = 0, Notes("ppppiiff")

    def run(self, grid: tuple[int, int], given: list[Tensor], numbers: tuple[float, ...]) -> None:
        self.asked += 1
        assert len(given) == 4 and numbers == (5, -6, 0.5, -2.0)
        given[2].fill_(1.0)
        self.known = launch.Known(self.driver.at, FUNCTION, THREADS, SHARED, 0)


def test_the_long_way_teaches_the_short_one(in_cpp: Any) -> None:
    kernel, (x, weight) = Kernel(), tensors()
    run = launch.LongWay(kernel, (2, 1), CPU, empty, (Y, STATS), (5, -6), in_cpp=in_cpp).shortest  # type: ignore[arg-type]
    y, stats = run(x, weight, NUMBERS)
    assert y.eq(1).all() and stats.shape == (4, 2) and kernel.asked == 1
    run(x, weight, NUMBERS)
    assert kernel.asked == 1 and kernel.driver.calls[0][-1][:2] == [x.data_ptr(), weight.data_ptr()]
    again = launch.LongWay(kernel, (2, 1), CPU, empty, (Y, STATS), (5, -6), in_cpp=in_cpp).shortest  # type: ignore[arg-type]
    again(x, weight, NUMBERS)
    assert kernel.asked == 1 and len(kernel.driver.calls) == 2


def test_ways_are_gone_with_who_has_them(in_cpp: Any) -> None:
    """They are no circles: nothing would collect what C++ holds."""
    long = launch.LongWay(Kernel(), (2, 1), CPU, empty, (Y, STATS), (5, -6), in_cpp=in_cpp)  # type: ignore[arg-type]
    gone, run = weakref.ref(long), long.shortest
    run(*tensors(), NUMBERS)
    del long, run
    assert gone() is None


def test_the_long_way_alone() -> None:
    kernel, (x, _) = Kernel(), tensors()
    run = launch.LongWay(kernel, (2, 1), CPU, empty, (Y, None), (5, -6), alone=True).shortest  # type: ignore[arg-type]
    for asked in (1, 2):
        assert run(x, None, NUMBERS).eq(1).all() and kernel.asked == asked


class Triton:
    """Two threads that come at once both compile; what is not kept is unloaded, as Triton does."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.compiled = 0

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self._run

    def _run(self, *arguments: Any, **options: Any) -> Any:
        if self.kept is None:
            time.sleep(0.05)
            self.compiled += 1
            self.kept = compiled()
        return self.kept


def test_one_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton()
    monkeypatch.setattr(launch, "_kernels", lambda: SimpleNamespace(forward=triton))
    monkeypatch.setattr(launch, "_driver", lambda: 7)
    kernel, (x, weight) = launch.Kernel("forward", (), 4), tensors()
    threads = [threading.Thread(target=kernel.run, args=((1, 1), [x, weight], (1, 0.5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert triton.compiled == 1 and kernel.found is triton.kept and kernel.known == launch.Known(7, 99, 128, 32, 1)


def test_memory_that_is_gone_is_an_error() -> None:
    x = torch.randn(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=GONE[:30]):
        launch.Kernel("forward", (), 4).run((1, 1), [x], ())
