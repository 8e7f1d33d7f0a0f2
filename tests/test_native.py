"""The kernel of CompensatedLayerNorm for CPUs against float64, and where it must not be used.

Twice: as Python calls it, and as `usual.cpp` does.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fused import near
from test_fused_where import Other, Watches
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import native, shortest, usual
from squeeze_release.modules.kernels.inputs import Removed, like

pytestmark = pytest.mark.skipif(native._library() is None, reason="there was no C compiler at installation")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _no_gradients(called_by: str) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def norm(kept: int, removed: int, dtype: torch.dtype = torch.float32, offset: float = 2, **how: Any) -> Any:
    made = CompensatedLayerNorm(kept, dtype=dtype, **how)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    made.merge(torch.randn(removed, dtype=torch.float64) + offset)
    return made.requires_grad_(False)


def applies(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    removed = Removed.of(x.size(-1), 1, 1.0, 1.0, 1.0)
    norm = {"_parameters": {"weight": weight, "bias": bias}, "_numbers": removed, "_kept": x.size(-1)}
    return shortest.normalize(x, norm | {"_buffers": {"statistics": x}, "_known": x}, False) is not None


def compare(made: CompensatedLayerNorm, x: Tensor, bound: float = 1e-6) -> None:
    assert applies(x, made.weight, made.bias)
    y = made(x)
    assert y.dtype == x.dtype and y.is_contiguous()
    near(y, copy.deepcopy(made).double()(x.double()), bound)


@pytest.mark.usefixtures("_threads")
@BOTH
@pytest.mark.parametrize("width, rows", [(3, 70), (16, 3), (100, 67), (511, 4), (513, 70), (1000, 40)])
@pytest.mark.parametrize("removed", [0, 5])
def test_kernel_equals_float64(width: int, rows: int, removed: int, dtype: torch.dtype) -> None:
    compare(norm(width, removed, dtype), (2 * torch.randn(rows, width) + 1).to(dtype))


def test_one_channel_beside_those_removed() -> None:
    compare(norm(1, 5), torch.randn(5, 1))


def test_wide_rows_are_summed_well() -> None:
    compare(norm(100_000, 10), 3 + torch.randn(3, 100_000), 5e-7)


@BOTH
@pytest.mark.parametrize("how", [{"bias": False}, {"elementwise_affine": False}])
def test_without_weight_or_bias(how: dict[str, bool], dtype: torch.dtype) -> None:
    compare(norm(36, 3, dtype, **how), torch.randn(4, 5, 36).to(dtype))


def test_parameters_of_float32_for_an_input_of_bfloat16() -> None:
    compare(norm(48, 3), torch.randn(10, 48).bfloat16())


@pytest.mark.parametrize("mean, offset", [(1e4, 1e4), (-300.0, 0.0), (0.0, 1e4)])
def test_large_means_do_not_cancel(mean: float, offset: float) -> None:
    made, x = norm(200, 50, offset=offset), mean + torch.randn(30, 200)
    spread = max(1.0, abs(mean - offset) * 0.4)
    compare(made, x, 4e-7 * (1 + max(abs(mean), abs(offset)) / spread))


@BOTH
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    made, x = norm(20, 3, dtype), torch.randn(4, 20).to(dtype)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    y = made(x)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_rounds_to_the_nearest_and_to_even() -> None:
    """Beside so many removed channels, ones come out as the weights, of which some lie between two bfloat16."""
    made, ones = norm(512, 0, elementwise_affine=True), torch.ones(1, 512)
    made.eps, made.statistics = 0.0, torch.tensor([1e12, 0.0, 1e12], dtype=torch.float64)
    made.bias.zero_()
    made.weight.copy_(1 + torch.arange(512) / 512)
    assert torch.equal(made(ones)[0], made.weight)
    assert torch.equal(made(ones.bfloat16())[0], made.weight.bfloat16())


def test_strided_inputs() -> None:
    made, x = norm(12, 3), torch.randn(12, 7)
    compare(made, x.T)
    compare(made, torch.randn(7, 24)[:, ::2])
    compare(made, torch.randn(12).expand(5, 12))
    room = torch.randn(61)
    compare(made, room[1:].view(5, 12))


def test_nothing() -> None:
    assert norm(12, 3)(torch.randn(2, 0, 12)).shape == (2, 0, 12)


def test_an_input_that_lies_nowhere_is_not_taken_for_the_last_one() -> None:
    made = norm(100, 20, elementwise_affine=False)  # no parameter would tell them apart
    compare(made, torch.randn(5, 100))
    assert made(torch.empty(5, 100, device="meta")).is_meta


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 5, 7), (2, 6, 6, 6), (2, 6, 2, 3, 6)])
def test_channels_first(shape: tuple[int, ...], kernels_asked: list[bool]) -> None:
    made, x = norm(6, 3, channel_dim=1), torch.randn(shape)
    want = copy.deepcopy(made).double()(x.double())
    kernels_asked.clear()
    near(made(x), want)
    near(made(x.transpose(1, -1).contiguous().transpose(1, -1)), want)
    assert all(kernels_asked) and made(x).stride() == F.layer_norm(x.movedim(1, -1), (6,)).movedim(-1, 1).stride()


def test_the_same_width_in_another_place_is_an_error() -> None:
    made, x = norm(6, 3, channel_dim=1), torch.randn(2, 6, 5, 7)
    made(x)
    with pytest.raises(RuntimeError, match="keeps 6 channels"):
        made(x.permute(0, 2, 3, 1))


def test_numbers_that_are_yet_to_be_negated() -> None:
    made, x = norm(12, 3), torch.randn(5, 12)
    negated = torch._neg_view(x)
    assert not applies(negated, made.weight, made.bias)
    near(made(negated), copy.deepcopy(made).double()(-x.double()))


def test_two_threads_with_inputs_of_their_own() -> None:
    made = norm(64, 5)
    inputs = [torch.randn(7, 64), torch.randn(7, 64).bfloat16()]
    wanted = [made(x) for x in inputs]

    def work(number: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(made(inputs[number % 2]), wanted[number % 2]) for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_parametrized_norms(kernels_asked: list[bool]) -> None:
    made, x = norm(6, 3), torch.randn(5, 6)
    want = copy.deepcopy(made).double()(x.double())
    made.weight.mul_(0.5)
    parametrize.register_parametrization(made, "weight", Twice())
    near(made(x), want)
    assert not any(kernels_asked)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = norm(48, 9), torch.randn(10, 48)
    with_kernel = made(x)
    monkeypatch.setattr(shortest, "normalize", lambda *arguments: None)
    assert not torch.equal(with_kernel, made(x))  # for it is not the same arithmetic
    near(with_kernel, made(x).double())


def test_where_it_applies_and_where_not() -> None:
    made, x = norm(4, 2), torch.randn(3, 4)
    asked = (made.weight, made.bias)
    assert applies(x, *asked)
    for other in (x.half(), x.double(), x[:, :0], x.as_subclass(Other)):
        assert not applies(other, *asked)
    for weight in (made.weight.double(), made.weight[:3], torch.ones(8)[::2], made.weight.to("meta")):
        assert not applies(x, weight, made.bias)
    assert not applies(x, None, made.bias)
    assert not applies(x.bfloat16(), made.weight.bfloat16(), made.bias)


@torch.enable_grad()
def test_gradients_take_another_way(kernels_asked: list[bool]) -> None:
    made, x = norm(4, 2), torch.randn(3, 4, requires_grad=True)
    assert made(x).requires_grad
    made.requires_grad_()
    assert made(x.detach()).requires_grad
    with torch.no_grad():
        assert not made(x).requires_grad
    assert kernels_asked == [False, False, True]


def test_parameters_that_change_are_looked_at_again(kernels_asked: list[bool]) -> None:
    made, x = norm(4, 2), torch.randn(3, 4)

    def same() -> None:
        near(made(x), copy.deepcopy(made).double()(x.double()))

    same(), same()
    made.weight.data = torch.randn(4)
    same()
    made.weight.mul_(2), made.bias.add_(1)
    same()
    made.bias = nn.Parameter(torch.randn(8)[::2], requires_grad=False)
    same()
    made.weight = nn.Parameter(torch._neg_view(torch.randn(4)), requires_grad=False)
    same()
    made.weight, made.bias = nn.Parameter(torch.randn(4)), None
    same()
    made._parameters["weight"] = nn.Parameter(torch.randn(4).bfloat16())
    same()
    made._parameters["weight"] = None
    same()
    assert kernels_asked[::2] == [True, True, True, True, False, False, True, False, True]  # every second is of float64
    made.merge(torch.randn(3))
    same()
    made.bfloat16()
    near(made(x.bfloat16()), copy.deepcopy(made).double()(x.bfloat16().double()))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of eight numbers, each at the address of the first
    "every second": lambda room: room[::2],
    "one for all": lambda room: room[:1].expand(4),
    "negated": lambda room: torch._neg_view(room[:4]),
    "another type": lambda room: room.view(torch.bfloat16)[:4],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_another_view_at_the_same_address(view: Callable[[Tensor], Tensor], name: str) -> None:
    made, x, room = norm(4, 2), torch.randn(3, 4), torch.randn(8)
    getattr(made, name).data = room[:4]
    made(x)
    getattr(made, name).data = view(room)
    near(made(x), copy.deepcopy(made).double()(x.double()))


def test_a_parameter_that_shrank_is_an_error() -> None:
    made, x = norm(4, 2), torch.randn(3, 4)
    made(x)
    made.weight.data = made.weight.data[:2]
    with pytest.raises(RuntimeError, match="size of tensor"):
        made(x)


def test_a_shallow_copy_has_numbers_of_its_own() -> None:
    made, x = norm(4, 2), torch.randn(3, 4)
    other = copy.copy(made)
    other.eps = 5.0
    made(x)
    near(other(x), copy.deepcopy(other).double()(x.double()))
    near(made(x), copy.deepcopy(made).double()(x.double()))


def test_a_parameter_whose_memory_is_gone_is_an_error() -> None:
    made, x = norm(4, 2, elementwise_affine=True, bias=False), torch.randn(3, 4)
    made(x)
    made.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory is gone"):
        made(x)


@BOTH
@pytest.mark.parametrize("called_by", ["C++"], indirect=True)
def test_cpp_needs_no_python(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a kind of inputs that Python has looked at once: of other lengths and strides, and of other norms."""
    made, other = norm(8, 3, dtype), norm(8, 5, dtype, offset=9)
    of_images = norm(8, 3, dtype, channel_dim=1)
    made(torch.randn(2, 3, 8, dtype=dtype)), of_images(torch.randn(2, 8, 3, 5, dtype=dtype))
    monkeypatch.setattr(native, "_function", None)  # asked, it is an error
    monkeypatch.setattr(shortest, "_look", None)
    exact, others, images = (copy.deepcopy(each).double() for each in (made, other, of_images))
    monkeypatch.setattr(shortest, "_normalize", lambda *arguments: pytest.fail("handed on"))
    rows = torch.randn(5, 7, 8), torch.randn(2, 8, 3).mT, torch.randn(8).expand(4, 2, 8)
    pictures = torch.randn(1, 8, 7, 2), torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last)
    cases = [
        *((each, reference, x) for each, reference in ((made, exact), (other, others)) for x in rows),
        *((of_images, images, x) for x in pictures),
    ]
    results = [(each(x.to(dtype)), reference, x.to(dtype)) for each, reference, x in cases]
    monkeypatch.undo()
    for y, reference, x in results:
        assert y.dtype == dtype
        near(y, reference(x.double()))


@BOTH
@pytest.mark.parametrize("called_by", ["C++"], indirect=True)
@pytest.mark.parametrize("shape, channel_dim", [((3, 8), -1), ((2, 8, 5, 7), 1), ((40, 80, 16), -1), ((0, 8), -1)])
@pytest.mark.parametrize("how", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_python_and_cpp_say_the_same(
    shape: tuple[int, ...], channel_dim: int, how: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and it lies alike: which of them calls is a matter of when."""
    made, x = norm(shape[channel_dim], 3, dtype, channel_dim=channel_dim, **how), torch.randn(shape).to(dtype)
    by_cpp = made(x)
    monkeypatch.setattr(usual, "compiled", lambda: None)
    monkeypatch.setattr(shortest, "normalize", shortest._normalize)
    shortest.forget()
    by_python = made(x)
    assert torch.equal(by_cpp, by_python) and by_cpp.stride() == by_python.stride()


@pytest.mark.parametrize("called_by", ["Python"], indirect=True)
def test_small_inputs_that_are_common_ask_for_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(usual, "begin", lambda then: begun.append(then is shortest._shorten))
    monkeypatch.setattr(native, "OFTEN", 5)
    made = norm(8, 3)
    for _ in range(10):
        made(torch.randn(native.SMALL // 8 + 1, 8))  # which take their time
    for _ in range(4):
        made(torch.randn(native.SMALL // 8, 8))
    assert not begun
    for _ in range(4):
        made(torch.randn(3, 8))
    assert begun == [True]


@pytest.mark.parametrize("called_by", ["Python"], indirect=True)
def test_from_python_to_cpp(in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there from one call to the next."""
    made, x = norm(8, 3), torch.randn(3, 8)

    def begin(then: Callable[[Any], None]) -> None:
        monkeypatch.setattr(usual, "compiled", lambda: in_cpp)
        then(in_cpp)

    monkeypatch.setattr(usual, "begin", begin)
    monkeypatch.setattr(native, "OFTEN", 5)
    results, by_cpp = [], []
    for _ in range(10):
        results.append(made(x))
        by_cpp.append(shortest.normalize is not shortest._normalize)
    assert by_cpp == [False] * 4 + [True] * 6
    assert all(torch.equal(y, results[0]) for y in results)
    (((seen,),),) = [shortest._seen.values()]
    assert isinstance(seen.kernels.plain, in_cpp.Native)


def test_like_tells_apart_what_a_kernel_would_not() -> None:
    x, weight = torch.randn(2, 3, 4), nn.Parameter(torch.randn(4))
    in_cpp = usual.compiled()
    exact, loose = like(x, weight, in_cpp=in_cpp), like(x, weight, channels=-1, in_cpp=in_cpp)
    assert exact is not None and loose is not None
    fits_both = torch.randn(2, 3, 4)
    fits_loose = (torch.randn(5, 7, 4), torch.randn(2, 4, 3).mT, torch.randn(2, 6, 4)[:, ::2])
    fits_none = (torch.randn(2, 3, 5), torch.randn(3, 4), fits_both.double(), torch.randn(2, 3, 4, requires_grad=True))
    assert exact(fits_both, weight) and loose(fits_both, weight)
    assert [(exact(each, weight), loose(each, weight)) for each in fits_loose] == [(False, True)] * 3
    assert not any(same(each, weight) for same in (exact, loose) for each in fits_none)
    others = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(8)[::2]), weight.detach()
    assert not any(same(fits_both, other) for same in (exact, loose) for other in others)


def test_what_was_seen_keeps_no_tensor() -> None:
    made, x = norm(4, 2), torch.randn(3, 4)
    made(x)
    alive = [weakref.ref(each) for each in (x, made.weight)]
    del made, x
    assert [each() for each in alive] == [None, None]


@pytest.mark.parametrize("gradients", [False, True])
def test_buffers_that_are_exchanged(gradients: bool) -> None:
    made, other, x = norm(6, 3), norm(6, 5, offset=9), torch.randn(5, 6)
    made(x)
    state = dict(other.named_parameters()) | dict(other.named_buffers())
    with torch.set_grad_enabled(gradients):
        for given in (x, x.clone().requires_grad_(gradients)):
            near(torch.func.functional_call(made, state, (given,)), copy.deepcopy(other).double()(x.double()))
    near(made(x), copy.deepcopy(made).double()(x.double()))


def test_what_is_used_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest, "_seen", {})
    made, often = norm(4, 2), torch.randn(3, 4)
    for rank in range(1, 9):
        made(torch.randn([1] * rank + [4])), made(often)
    ((first, *others),) = shortest._seen.values()
    assert len(others) == 7 and first.same(torch.randn([1] * 8 + [4]), made.weight, made.bias)
    for _ in range(5):
        made(torch.randn(1, 1, 4))  # the third that was seen
    ((first, *others),) = shortest._seen.values()
    assert len(others) == 7 and first.same(torch.randn(5, 6, 4), made.weight, made.bias)


def test_an_ensemble() -> None:
    both, x = [norm(6, 3), norm(6, 5, offset=9)], torch.randn(5, 6)
    parameters, buffers = torch.func.stack_module_state(both)
    y = torch.vmap(lambda p, b: torch.func.functional_call(both[0], (p, b), (x,)))(parameters, buffers)
    near(y, torch.stack([copy.deepcopy(each).double()(x.double()) for each in both]))


def test_a_norm_that_was_moved_is_known(kernels_asked: list[bool]) -> None:
    made, x = norm(6, 3), torch.randn(5, 6)
    for other in (made.to("cpu").bfloat16().float(), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        kernels_asked.clear()
        other(x)
        assert kernels_asked == [True]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_an_error() -> None:
    made, x = norm(6, 3), torch.randn(5, 6)
    made(x)
    with pytest.raises(RuntimeError, match=r"[Nn]ested"):
        made(torch.nested.nested_tensor([x, x[:2]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_without_a_weight(dtype: torch.dtype) -> None:
    made, x = norm(6, 3, dtype), torch.randn(5, 6, dtype=dtype)
    bias, made.weight = made.bias, None
    with_bias = made(x)
    made.bias = None
    torch.testing.assert_close(with_bias, made(x) + bias)


def test_tensors_without_numbers(kernels_asked: list[bool]) -> None:
    made, x, zeros = norm(4, 2), torch.randn(3, 4), torch._efficientzerotensor(3, 4)
    near(made(zeros), copy.deepcopy(made).double()(torch.zeros(3, 4).double()))
    y = torch.func.functional_call(made, {"weight": zeros[0]}, (x,))
    near(y, made.bias.double().expand(3, 4))
    assert not any(kernels_asked)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in forward AD
def test_who_watches_sees_plain_ops(kernels_asked: list[bool]) -> None:
    made, x = norm(4, 2), torch.randn(3, 4)
    exact = copy.deepcopy(made).double()
    with Watches():
        made(x)
    near(torch.vmap(made)(x), exact(x.double()))
    near(torch.func.grad(lambda x: made(x).sin().sum())(x), torch.func.grad(lambda x: exact(x).sin().sum())(x.double()))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(made(forward_ad.make_dual(x, x))).tangent
    assert tangent is not None and tangent.abs().max() > 0
    near(torch.export.export(made, (x,), strict=False).module()(x), exact(x.double()))
    for pre_dispatch in (False, True):
        near(make_fx(made, pre_dispatch=pre_dispatch)(torch.zeros(3, 4))(x), exact(x.double()))
    assert not any(kernels_asked)  # that of float64 asks, in vain
