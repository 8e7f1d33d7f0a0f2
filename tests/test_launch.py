"""How a kernel is launched again, by `usual.c`, with a driver that notes what it is told; what is checked before."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


class Driver:
    """In place of CUDA's: it notes what a kernel of some pointers, integers, numbers and hidden pointers is told."""

    def __init__(self, types: str) -> None:
        self.types, self.calls, self.answer = types, [], 0
        whole, address = ctypes.c_uint, ctypes.c_void_p
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, address, *[whole] * 7, address, address, address)(self._launch)
        self.at: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _launch(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, _ = rest
        kinds = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        told = [ctypes.cast(places[i], ctypes.POINTER(kinds[t]))[0] for i, t in enumerate(self.types)]
        self.calls.append((function, shape, stream, told))
        return self.answer


class Long:
    """The long way: what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "the long way"


def empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def device() -> int:
    return 3


def stream(device: int) -> int:
    return 1000 + device


Y, STATS = ((4, 8), (8, 1), F32), ((4, 2), (2, 1), F32)


class Way:
    """A launch that knows its kernel: two tensors are read and two filled, then two integers and two numbers."""

    def __init__(self, in_c: Any, outputs: Any = (Y, STATS), alone: bool = False, empty: Any = empty, here: int = 3):
        self.driver, self.long = Driver("ppppiiffp"), Long()
        self.run = in_c.Launch(self.long, empty, outputs, (5, -6), alone, (11, 12), (device, stream, here))

    def known(self) -> Way:
        self.run.know(self.driver.at, FUNCTION, THREADS, SHARED, 1)
        return self


@pytest.fixture
def way(in_c: Any) -> Way:
    return Way(in_c).known()


def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(8)


def test_what_the_kernel_is_told(way: Way) -> None:
    x, weight = tensors()
    y, stats = way.run(x, weight, (0.5, -2.0))
    assert (y.shape, stats.shape) == ((4, 8), (4, 2))
    addresses = [each.data_ptr() for each in (x, weight, y, stats)]
    assert way.driver.calls == [
        (FUNCTION, [11, 12, 1, THREADS, 1, 1, SHARED], 1003, [*addresses, 5, -6, 0.5, -2.0, 0]),
    ]
    assert not way.long.calls


def test_what_is_missing_is_where_the_first_is(in_c: Any) -> None:
    way, (x, _) = Way(in_c, (Y, None)).known(), tensors()
    y, nothing = way.run(x, None, (0.5, -2.0))
    assert nothing is None
    assert way.driver.calls[0][-1][:4] == [x.data_ptr(), x.data_ptr(), y.data_ptr(), x.data_ptr()]


def test_one_output_alone(in_c: Any) -> None:
    way, (x, weight) = Way(in_c, (Y, None), alone=True).known(), tensors()
    assert way.run(x, weight, (0.5, -2.0)).shape == (4, 8)


def test_a_kernel_that_has_not_run_takes_the_long_way(in_c: Any) -> None:
    way, (x, weight) = Way(in_c), tensors()
    numbers = (0.5, -2.0)
    assert way.run(x, weight, numbers) == "the long way"
    ((*read, last),) = way.long.calls
    assert read[0] is x and read[1] is weight and last is numbers and not way.driver.calls
    assert isinstance(way.known().run(x, weight, numbers), tuple) and len(way.driver.calls) == 1


@pytest.mark.parametrize(
    "why", ["not aligned", "memory is gone", "another device", "an output is not aligned", "it was not launched"]
)
def test_other_tensors_take_the_long_way(why: str, in_c: Any) -> None:
    def uneven(shape: Any, stride: Any, dtype: Any) -> Tensor:
        return torch.empty(100)[1:]

    way = Way(in_c, empty=uneven if why == "an output is not aligned" else empty, here=4 if "device" in why else 3)
    way.known()
    x, weight = tensors()
    if why == "not aligned":
        weight = torch.randn(9)[1:]
    if why == "memory is gone":
        weight.untyped_storage().resize_(0)
    way.driver.answer = 201 * (why == "it was not launched")  # a thread has no context before it uses CUDA
    assert way.run(x, weight, (0.5, -2.0)) == "the long way"
    assert len(way.driver.calls) == (why == "it was not launched")


@pytest.mark.parametrize(
    "arguments, names",
    [((), {}), ((1.0,), {}), (((0.5,),), {}), ((*tensors(), 0.5), {}), ((*tensors(), (0.5, 1.0)), {"x": 1})],
    ids=["none", "a number", "no tensor", "no tuple", "names"],
)
def test_other_arguments_take_the_long_way_too(arguments: Any, names: Any, way: Way) -> None:
    class Any_(Long):
        def __call__(self, *arguments: Any, **names: Any) -> str:
            return super().__call__(*arguments, *names)

    other = Any_()
    run = type(way.run)(other, empty, (Y, STATS), (5, -6), False, (11, 12), (device, stream, 3))
    run.know(way.driver.at, FUNCTION, THREADS, SHARED, 1)
    assert run(*arguments, **names) == "the long way" and not way.driver.calls


def test_more_parameters_than_there_is_room_for(way: Way) -> None:
    assert way.run(*tensors(), (0.0,) * 40) == "the long way"
    assert way.run(*[torch.randn(4)] * 40, (0.0,)) == "the long way"


def test_errors_are_handed_on(in_c: Any, way: Way) -> None:
    x, weight = tensors()
    with pytest.raises(AttributeError, match="data_ptr"):
        way.run(x, "weight", (0.5, -2.0))
    with pytest.raises(TypeError):
        way.run(x, weight, ("0.5", -2.0))

    def full(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        Way(in_c, empty=full).known().run(x, weight, (0.5, -2.0))
    with pytest.raises(TypeError):
        in_c.Launch(None, None, [], (), False, (1, 1), (device, stream, 0))


def test_nothing_is_kept(in_c: Any) -> None:
    """References are counted by hand in C: one too many would keep a tensor for ever, one too few end the process."""
    way, (x, weight), numbers = Way(in_c).known(), tensors(), (0.5, -2.0)
    counted = x, weight, numbers, way.long, Y, STATS, None

    def run() -> None:
        way.run(x, weight, numbers)
        way.run(x, None, numbers)
        way.run(x, torch.randn(9)[1:], numbers)
        way.driver.answer = 1
        way.run(x, weight, numbers)
        way.driver.answer = 0
        way.driver.calls.clear(), way.long.calls.clear()

    run()
    before = [sys.getrefcount(each) for each in counted[:-1]]
    for _ in range(100):
        run()
    assert [sys.getrefcount(each) for each in counted[:-1]] == before


def test_a_circle_is_collected(in_c: Any) -> None:
    long = Long()
    long.short = in_c.Launch(long, empty, (Y,), (), True, (1, 1), (device, stream, 0))  # type: ignore[attr-defined]
    gone = weakref.ref(long)
    del long
    gc.collect()
    assert gone() is None


# --------------------------------------------------------------------------------------------------------- the long way


class Kernel:
    """Triton's part: it fills what it is given, and what it has compiled is known at once."""

    def __init__(self) -> None:
        self.known: launch.Known | None = None
        self.asked = 0

    def run(self, grid: tuple[int, int], given: list[Tensor], numbers: tuple[float, ...]) -> None:
        self.asked += 1
        assert len(given) == 4 and numbers == (5, -6, 0.5, -2.0)
        given[2].fill_(1.0)
        self.known = launch.Known(1, FUNCTION, THREADS, SHARED, 0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    yield


@pytest.mark.usefixtures("here")
def test_the_long_way_teaches_the_short_one(in_c: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.usual, "compiled", lambda: in_c)
    monkeypatch.setattr(launch, "current_stream", lambda device: 9)
    kernel, driver, (x, weight) = Kernel(), Driver("ppppiiff"), tensors()
    run = launch.LongWay(kernel, (2, 1), -1, empty, (Y, STATS), (5, -6)).shortest  # type: ignore[arg-type]
    y, stats = run(x, weight, (0.5, -2.0))
    assert y.eq(1).all() and stats.shape == (4, 2) and kernel.asked == 1
    run.know(driver.at, FUNCTION, THREADS, SHARED, 0)  # which Triton's part had made up
    run(x, weight, (0.5, -2.0))
    assert kernel.asked == 1 and driver.calls[0][-1][:2] == [x.data_ptr(), weight.data_ptr()]


@pytest.mark.usefixtures("here")
def test_the_long_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.usual, "compiled", lambda: None)
    kernel, (x, _) = Kernel(), tensors()
    run = launch.LongWay(kernel, (2, 1), -1, empty, (Y, None), (5, -6), alone=True).shortest  # type: ignore[arg-type]
    for asked in (1, 2):
        assert run(x, None, (0.5, -2.0)).eq(1).all() and kernel.asked == asked


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
