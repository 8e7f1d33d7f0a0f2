"""The kernels of CompensatedLayerNorm, and all that leads to them and back, against float64.

pytest tests/test_fused.py                      # on a GPU: compiled; on a CPU: in plain torch
TRITON_INTERPRET=1 pytest tests/test_fused.py   # on a CPU, interpreted; Triton 3.9 (3.6 trips over numpy 2.4)

Twice: as Python calls them, and as `usual.cpp` does.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_kernels import Plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import fused, shortest
from squeeze_release.modules.kernels import rows as of_rows

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = HAS_TRITON and torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if COMPILED else "cpu"
needs_gpu = pytest.mark.skipif(not COMPILED, reason="needs Triton and a GPU")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _kernels_of_this_test(called_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not COMPILED and not INTERPRETED:
        Plain(monkeypatch)


def norm(kept: int, removed: int, dtype: torch.dtype = torch.float32, offset: float = 2, **how: Any) -> Any:
    made = CompensatedLayerNorm(kept, dtype=dtype, **how).to(DEVICE)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    made.merge(torch.randn(removed, dtype=torch.float64) + offset)
    return made


def run(made: CompensatedLayerNorm, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return fused.normalize(x, made.weight, made.bias, made._numbers, dtype or x.dtype)


def near(got: Tensor, exact: Tensor, bound: float = 1e-6) -> None:
    """float32 within `bound` of the largest entry; of half precision each entry rounded once (the interpreter cuts)."""
    got, exact = got.detach(), exact.detach()
    assert got.shape == exact.shape and exact.abs().max() > 0
    rounding = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps * (1.0 if INTERPRETED else 0.501)
    off = (got.double() - exact).abs() - rounding * exact.abs()
    assert off.max() <= bound * exact.abs().max(), f"{float(off.max() / exact.abs().max()):.1e}"


def compare(made: CompensatedLayerNorm, x: Tensor, bound: float = 1e-6, dtype: torch.dtype | None = None) -> None:
    """Output with and without gradients, and all gradients."""
    exact, x = copy.deepcopy(made).double(), x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, want = run(made, x, dtype), exact(wide)
    with torch.no_grad():
        assert torch.equal(run(made, x, dtype), y)
    near(y, want, bound)
    dy = torch.randn_like(y)
    ours, theirs = (x, *made.parameters()), (wide, *exact.parameters())
    grads = torch.autograd.grad(y, ours, dy), torch.autograd.grad(want, theirs, dy.double())
    for parameter, got, wanted in zip(ours, *grads, strict=True):
        assert got.dtype == parameter.dtype
        near(got, wanted, bound)


# -------------------------------------------------------------------------------------------------------------- kernels


@BOTH
@pytest.mark.parametrize("width, rows", [(3, 70), (64, 101), (100, 67), (768, 9), (1000, 5), (4096, 2)])
@pytest.mark.parametrize("removed, at_once", [(0, True), (5, True), (5, False)])
def test_kernels_equal_float64(
    width: int, rows: int, removed: int, at_once: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_rows, "AT_ONCE_ROWS", 512 if at_once else 0)
    compare(norm(width, removed, dtype), (2 * torch.randn(rows, width, device=DEVICE) + 1).to(dtype))


def test_one_channel_beside_those_removed() -> None:
    compare(norm(1, 5), torch.randn(5, 1, device=DEVICE))


@needs_gpu
@BOTH
@pytest.mark.parametrize("width", [64, 96, 250, 384, 515, 1024, 2048, 4096, 9000, fused.MAX_WIDTH])
def test_kernels_equal_float64_on_many_rows(width: int, dtype: torch.dtype) -> None:
    rows = max(33, 2**21 // width) + 1  # so that programs of `backward` see several tiles
    compare(norm(width, 7, dtype), (2 * torch.randn(rows, width, device=DEVICE) + 1).to(dtype), 4e-6)


@pytest.mark.parametrize("few, at_once", [(0, 0), (10**9, 0), (0, 10**9)])
@pytest.mark.parametrize("width, rows", [(20, 260), (700, 11)])
def test_tiles_large_and_small(width: int, rows: int, few: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_rows, "AT_ONCE_ROWS", at_once)
    monkeypatch.setattr(of_rows, "FEW_PROGRAMS", few)
    monkeypatch.setattr(of_rows, "_multiprocessors", lambda device: 1)  # few programs, many turns
    compare(norm(width, 4), torch.randn(rows, width, device=DEVICE))


@pytest.mark.parametrize("how", [{"bias": False}, {"elementwise_affine": False}])
@BOTH
def test_without_weight_or_bias(how: dict[str, bool], dtype: torch.dtype) -> None:
    compare(norm(36, 3, dtype, **how), torch.randn(4, 5, 36, device=DEVICE).to(dtype))


@BOTH
@pytest.mark.parametrize("shape", [(2, 20, 5, 7), (1, 300, 3, 3), (3, 1, 4, 4), (5, 7, 1, 1)])
@torch.no_grad()
def test_images_that_lie_channel_by_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, x = norm(shape[1], 4, dtype), torch.randn(shape, device=DEVICE).to(dtype).permute(0, 2, 3, 1)
    y = run(made, x)
    assert y.is_contiguous()
    near(y, copy.deepcopy(made).double()(x.double()))
    if x.shape[1] > 1 and shape[1] > 1:
        assert any(kernel.name == "forward" and kernel.constants[3] for kernel in of_rows._kernels.values())


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("lies", ["channel by channel", "channels last", "with gaps"])
@pytest.mark.parametrize("shape", [(2, 20, 5, 7), (3, 1, 4, 4), (5, 7, 1, 1), (1, 6, 1, 9)])
@torch.no_grad()
def test_images(shape: tuple[int, ...], lies: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_rows, "FEW_PROGRAMS", few)
    made, x = norm(shape[1], 4), torch.randn(*shape[:3], 2 * shape[3], device=DEVICE)
    if lies == "with gaps":
        x = x[..., ::2]
    else:
        x = x[..., : shape[3]].contiguous(
            memory_format=torch.channels_last if lies == "channels last" else torch.contiguous_format
        )
    rows = of_rows.Rows.of(x, made.weight, made.bias, x.dtype, image=True)
    y = rows.plain(x)(x, made.weight, made.bias, made._numbers)
    assert y.shape == x.shape and y.permute(0, 2, 3, 1).is_contiguous()
    near(y.permute(0, 2, 3, 1), copy.deepcopy(made).double()(x.permute(0, 2, 3, 1).double()))


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_twice(shape: tuple[int, ...]) -> None:
    made, x = norm(6, 3), torch.randn(shape, device=DEVICE, requires_grad=True)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    for y, of in ((run(made, x), (x, *made.parameters())), (exact(wide), (wide, *exact.parameters()))):
        first = torch.autograd.grad(y.sin().sum(), of, create_graph=True)
        again = torch.autograd.grad(sum(each.square().sum() for each in first), of)
        if of[0] is x:
            got = (*first, *again)
    for mine, wanted in zip(got, (*first, *again), strict=True):
        near(mine, wanted, 1e-5)


@pytest.mark.parametrize("change", ["strided", "negated", "unpacked", "nothing comes back"])
def test_what_changed_between_forward_and_backward(change: str) -> None:
    made, x, dy = norm(6, 3), torch.randn(5, 6, device=DEVICE, requires_grad=True), torch.randn(5, 6, device=DEVICE)

    def unpack(saved: Tensor) -> Tensor:
        return saved.T.contiguous().T if change == "unpacked" and saved.shape == x.shape else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        y = run(made, x)
    if change in ("strided", "negated"):
        made.weight.data = (
            torch.randn(12, device=DEVICE)[::2] if change == "strided" else torch._neg_view(made.weight.data)
        )
    dy = torch._efficientzerotensor(5, 6, device=DEVICE) if change == "nothing comes back" else dy
    got = torch.autograd.grad(y, x, dy)[0]
    want = fused._written_out(x.detach().double(), made.weight.double(), None, dy.double(), made._numbers)[0]
    assert want is not None
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seen", [False, True])
def test_activations_that_are_computed_again(seen: bool) -> None:
    """torch.utils.checkpoint lets each saved tensor be unpacked once."""
    made, x = norm(16, 3), torch.randn(5, 16, device=DEVICE, requires_grad=True)
    want = torch.autograd.grad(run(made, x).sin().sum(), x)[0]
    if not seen:
        shortest.forget()
    for _ in range(2):
        y = checkpoint(lambda x: run(made, x), x, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), x)[0], want)


def test_two_norms_of_one_kind() -> None:
    """They share rows, and not what they have lost."""
    norms, x = [norm(16, removed, offset=5) for removed in (3, 9)], torch.randn(5, 16, device=DEVICE)
    for _ in range(2):
        for made in norms:
            compare(made, x.detach())


@pytest.mark.parametrize("change", ["weight's dtype", "x's dtype", "width", "rows", "statistics"])
def test_kernels_are_not_given_what_they_were_not_made_for(change: str) -> None:
    made, x = norm(16, 3), torch.randn(4, 16, device=DEVICE)
    rows = of_rows.Rows.of(x, made.weight, made.bias, x.dtype)
    stats, dy, weight = torch.randn(4, 2, device=DEVICE), torch.randn(4, 16, device=DEVICE), made.weight

    def there() -> bool:
        return rows.way_back[0](x, weight, stats, dy) or rows.backward(x, weight, stats, dy) is not None

    for _ in range(2):  # before it knows them, and after
        assert there()
    if change == "weight's dtype":
        weight = nn.Parameter(weight.detach().bfloat16())
    elif change == "statistics":
        stats = stats.bfloat16()
    else:
        other = {"x's dtype": x.bfloat16(), "width": torch.randn(4, 8), "rows": torch.randn(400, 16)}
        x = other[change].to(DEVICE)
    assert not there()
    rows.way_back = of_rows._never, None
    assert not there()


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters(frozen: str) -> None:
    made, x = norm(24, 3), torch.randn(40, 24, device=DEVICE, requires_grad=True)
    expected = dict(made.named_parameters())
    exact = copy.deepcopy(made).double()
    for each in (made, exact):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(frozen not in (name, "both"))
    wide = x.detach().double().requires_grad_()
    run(made, x).square().sum().backward()
    exact(wide).square().sum().backward()
    near(x.grad, wide.grad)
    for name, parameter in exact.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None) == (not parameter.requires_grad)
        if parameter.grad is not None:
            near(expected[name].grad, parameter.grad)


def test_parameters_of_float32_and_an_output_of_float32_as_under_autocast() -> None:
    compare(norm(48, 3), torch.randn(10, 48, device=DEVICE).bfloat16())
    compare(norm(48, 3), torch.randn(10, 48, device=DEVICE).bfloat16(), dtype=torch.float32)


@pytest.mark.parametrize("mean, offset", [(1e4, 1e4), (-300.0, 0.0), (0.0, 1e4)])
def test_large_means_do_not_cancel(mean: float, offset: float) -> None:
    """float32 cannot know a mean better than to its last digits; squares of it would lose all."""
    made, x = norm(200, 50, offset=offset), mean + torch.randn(30, 200, device=DEVICE)
    exact = copy.deepcopy(made).double()(x.double())
    with torch.no_grad():
        spread = max(1.0, abs(mean - offset) * 0.4)
        near(run(made, x), exact, 4e-7 * (1 + max(abs(mean), abs(offset)) / spread))


def test_rows_that_are_all_one_number() -> None:
    made, x = norm(16, 4, offset=3), torch.full((3, 16), 3.0, device=DEVICE)
    near(run(made, x), copy.deepcopy(made).double()(x.double()))


@BOTH
def test_pointers_that_are_not_aligned(dtype: torch.dtype) -> None:
    made, room = norm(64, 3, dtype), torch.randn(10 * 64 + 1, device=DEVICE).to(dtype)
    for start in (0, 1, 0, 1):  # the aligned kernel is there already when the other is needed, and the other way round
        compare(made, room[start : start + 640].view(10, 64).detach())


def test_gradients_that_are_expanded_or_transposed() -> None:
    made, x = norm(12, 3), torch.randn(7, 12, device=DEVICE, requires_grad=True)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    ways: list[Callable[[Tensor], Tensor]] = [lambda y: y.sum(), lambda y: (y.T * torch.arange(7.0).to(y)).sum()]
    for scalar in ways:
        scalar(exact(wide)).backward()
        scalar(run(made, x)).backward()
        near(x.grad, wide.grad)
        near(made.bias.grad, exact.bias.grad)


def test_numbers_that_are_yet_to_be_negated() -> None:
    made, x, dy = norm(10, 3), torch.randn(4, 10, device=DEVICE, requires_grad=True), torch.randn(4, 10, device=DEVICE)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    (got,) = torch.autograd.grad(run(made, x), x, torch._neg_view(dy))
    near(got, torch.autograd.grad(exact(wide), wide, -dy.double())[0])
    assert not fused.applies(torch._neg_view(x.detach()), made.weight, made.bias)


def test_gradients_in_a_batch() -> None:
    made, x = norm(10, 3), torch.randn(4, 10, device=DEVICE, requires_grad=True)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    vectors = torch.randn(3, 4, 10, device=DEVICE)
    (got,) = torch.autograd.grad(run(made, x), x, vectors, is_grads_batched=True)
    near(got, torch.stack([torch.autograd.grad(exact(wide), wide, v.double())[0] for v in vectors]))


def test_gradients_of_gradients() -> None:
    made, x = norm(10, 3), torch.randn(6, 10, device=DEVICE, requires_grad=True)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    found = []
    for function, at, weight in ((lambda x: run(made, x), x, made.weight), (exact, wide, exact.weight)):
        (first,) = torch.autograd.grad(function(at).sin().sum(), at, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (at, weight)))
    for got, wanted in zip(*found, strict=True):
        near(got, wanted, 1e-5)


def test_gradients_of_gradients_of_what_needs_none() -> None:
    """Of dy nothing is asked, as where a Hessian is multiplied by a vector; and kernels for such tensors are known."""
    made, x, dy = norm(10, 3), torch.randn(6, 10, device=DEVICE, requires_grad=True), torch.randn(6, 10, device=DEVICE)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    for _ in range(2):
        torch.autograd.grad(run(made, x), x, dy)
    (got,) = torch.autograd.grad(run(made, x), x, dy, create_graph=True)
    (want,) = torch.autograd.grad(exact(wide), wide, dy.double(), create_graph=True)
    near(got, want)
    near(torch.autograd.grad(got.square().sum(), x)[0], torch.autograd.grad(want.square().sum(), wide)[0], 1e-5)
