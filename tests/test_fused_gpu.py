"""CompensatedLayerNorm with its kernels, on a GPU: that it uses them, and where it must not. Skipped elsewhere."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_fused import BOTH, _kernels_of_this_test, near, needs_gpu, norm  # noqa: F401  a fixture for each test
from torch import Tensor, nn

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import launch, shortest, usual
from squeeze_release.modules.kernels import rows as of_rows

pytestmark = needs_gpu


def module_and_twin(channel_dim: int = -1) -> tuple[CompensatedLayerNorm, CompensatedLayerNorm]:
    made = norm(96, 20, channel_dim=channel_dim)
    return made, copy.deepcopy(made).double()


@pytest.mark.parametrize("rows, backward", [(50, {"backward_at_once"}), (600, {"backward", "total"})])
def test_the_module_runs_kernels_and_finds_them_again(rows: int, backward: set[str]) -> None:
    made, exact = module_and_twin()
    for _ in range(3):  # the third is launched the short way, forward and backward
        x = torch.randn(rows, 96, device="cuda", requires_grad=True)
        wide = x.detach().double().requires_grad_()
        y, want = made(x), exact(wide)
        near(y, want)
        near(torch.autograd.grad(y.sin().sum(), x)[0], torch.autograd.grad(want.sin().sum(), wide)[0])
    ran = [kernel for kernel in of_rows._kernels.values() if kernel.found is not None]
    assert {kernel.name for kernel in ran} == {"forward"} | backward
    assert all(kernel.known is not None for kernel in ran)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_first_and_strided(channels_last: bool, gradients: bool) -> None:
    made, exact = module_and_twin(channel_dim=1)
    x = torch.randn(2, 96, 5, 7, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            near(made(x), exact(x.double()))
        assert made(x).permute(0, 2, 3, 1).is_contiguous()
        near(made(x[..., ::2]), exact(x[..., ::2].double()))
    assert of_rows._kernels


def test_a_parameter_whose_memory_is_gone_is_an_error() -> None:
    made, x = norm(96, 20), torch.randn(5, 96, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            made(x)
        made.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="memory is gone"):
            made(x)


def test_capture_in_a_graph() -> None:
    made, exact = module_and_twin()
    x = torch.randn(70, 96, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        y = made(x)
        return y, *torch.autograd.grad(y.sin().sum(), (x, made.weight, made.bias))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    wide = x.detach().double().requires_grad_()
    want = exact(wide)
    grads = torch.autograd.grad(want.sin().sum(), (wide, exact.weight, exact.bias))
    for got, wanted in zip(results, (want, *grads), strict=True):
        near(got, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    made, x = norm(96, 20), torch.randn(50, 96, device="cuda", requires_grad=True)
    made(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made(x).sum().backward()
        with torch.inference_mode():
            made(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@BOTH
def test_autocast_is_as_for_layer_norm(dtype: torch.dtype) -> None:
    made, plain = norm(96, 20), nn.LayerNorm(96, device="cuda")
    x = torch.randn(50, 96, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = made(x)
        assert y.dtype == plain(x).dtype == torch.float32
    near(y, copy.deepcopy(made).double()(x.double()))
    y.sum().backward()
    assert x.grad.dtype == dtype and of_rows._kernels


def test_the_same_gradients_in_every_run() -> None:
    made, x = norm(64, 20), torch.randn(70_000, 64, device="cuda", requires_grad=True)
    runs = [torch.autograd.grad(made(x).sin().sum(), (x, made.weight, made.bias)) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_who_needs_plain_ops_gets_them() -> None:
    made, exact = module_and_twin()
    x = torch.randn(8, 96, device="cuda")
    want, tangent = torch.func.jvp(exact, (x.double(),), (x.double(),))
    for got in (torch.vmap(made)(x), torch.compile(made, fullgraph=True)(x)):
        near(got, want)
    near(torch.export.export(made, (x,), strict=False).module()(x), want)
    near(torch.func.jvp(made, (x,), (x,))[1], tangent, 1e-5)
    assert not of_rows._kernels
    x.requires_grad_()
    compiled = torch.autograd.grad(torch.compile(made)(x).sin().sum(), x)[0]
    near(compiled, torch.autograd.grad(exact(wide := x.detach().double().requires_grad_()).sin().sum(), wide)[0])


# ---------------------------------------------------------------------------------------------------- without gradients


@BOTH
@pytest.mark.parametrize("affine, bias", [(True, True), (True, False), (False, False)])
@torch.no_grad()
def test_the_shortest_way(affine: bool, bias: bool, dtype: torch.dtype, kernels_asked: list[bool]) -> None:
    made = norm(100, 20, dtype, elementwise_affine=affine, bias=bias)
    exact = copy.deepcopy(made).double()
    for rows in (1, 50, 20_000):  # few programs and many: two kernels, each of which must have run before
        for _ in range(2):
            x = torch.randn(rows, 100, device="cuda", dtype=dtype)
            want = exact(x.double())
            kernels_asked.clear()
            near(made(x), want)
    assert kernels_asked == [True]
    assert made(x[:0]).shape == (0, 100)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            y = made(x)
            assert y.dtype == torch.float32
            near(y, want)
    assert made(x).dtype == dtype
    storage = torch.randn(rows * 100 + 1, device="cuda", dtype=dtype)
    near(made(storage[1:].view(rows, 100)), exact(storage[1:].view(rows, 100).double()))  # not aligned


@torch.no_grad()
def test_parameters_that_change_are_looked_at_again(kernels_asked: list[bool]) -> None:
    made, x = norm(96, 20), torch.randn(50, 96, device="cuda")

    def same() -> None:
        want = copy.deepcopy(made).double()(x.double())
        made(x)  # a kernel that is new runs the long way once
        kernels_asked.clear()
        near(made(x), want)

    for weight in (torch.randn(96), torch.randn(96).bfloat16()):
        made.weight.data = weight.cuda()
        same()
        made.weight.mul_(2), made.bias.add_(1)
        same()
        assert kernels_asked == [True]
    made.weight, made.bias = nn.Parameter(torch.randn(96, device="cuda")), None
    same()
    made.merge(torch.randn(3))
    same()
    assert kernels_asked == [True]
    made.weight = nn.Parameter(torch.randn(97, device="cuda")[1:])  # not aligned
    same()
    assert kernels_asked == [True]
    made.weight = nn.Parameter(torch._neg_view(torch.randn(96, device="cuda")))
    same()
    assert kernels_asked == [False]


@torch.no_grad()
def test_the_shortest_way_on_another_stream_and_in_a_graph() -> None:
    made, exact = module_and_twin()
    x = torch.randn(50, 96, device="cuda")
    for _ in range(2):
        made(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.add_(1)
        y = made(x)  # had it been launched elsewhere, it would not have waited
    side.synchronize()
    near(y, exact(x.double()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = made(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    near(y, exact(x.double()))


@pytest.mark.parametrize("rows", [50, 600])
@pytest.mark.parametrize("called_by", ["C++"], indirect=True)
def test_triton_is_asked_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = norm(96, 20), torch.randn(rows, 96, device="cuda", requires_grad=True)

    def all_of_it() -> tuple[Tensor, ...]:
        with torch.no_grad():
            without = made(x)
        y = made(x)
        return without, y, *torch.autograd.grad(y.sin().sum(), (x, made.weight, made.bias))

    first = all_of_it()
    monkeypatch.setattr(launch.Kernel, "run", None)  # asked, it is an error
    for one, other in zip(first, all_of_it(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("called_by", ["Python"], indirect=True)
def test_from_python_to_cpp(in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there from one call to the next, and a graph that Python has begun is still good."""
    made, x = norm(96, 20), torch.randn(50, 96, device="cuda", requires_grad=True)
    y = made(x)
    want = torch.autograd.grad(made(x).sin().sum(), (x, made.weight, made.bias))
    assert shortest.normalize is shortest._normalize and y.grad_fn.name() == "CompensatedLayerNormBackward"
    monkeypatch.setattr(usual, "compiled", lambda: in_cpp)
    monkeypatch.setattr(usual, "begin", lambda then: shortest.normalize is shortest._normalize and then(in_cpp))
    shortest.forget()
    for made_by in (made(x), made(x), made(x), y):
        got = torch.autograd.grad(made_by.sin().sum(), (x, made.weight, made.bias))
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert shortest.normalize is not shortest._normalize and "CppNode" in made(x).grad_fn.name()


@torch.no_grad()
def test_a_thread_that_has_not_used_cuda_yet() -> None:
    made, x = norm(96, 20), torch.randn(50, 96, device="cuda")
    want = [made(x) for _ in range(2)][-1]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(torch.no_grad()(made), x).result(), want)
