"""Where the kernels of CompensatedLayerNorm apply and where not, and its gradients without them; on any machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_fused import near, norm
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import fused


def test_gradients_written_out() -> None:
    made, x = norm(9, 4).cpu(), torch.randn(2, 5, 9, requires_grad=True)
    exact, wide, dy = copy.deepcopy(made).double(), x.detach().double().requires_grad_(), torch.randn(2, 5, 9)
    wanted = torch.autograd.grad(exact(wide), (wide, exact.weight, exact.bias), dy.double())
    got = fused._written_out(x, made.weight, torch.float32, dy, made._numbers)
    for one, other in zip(got, wanted, strict=True):
        near(one, other)
    assert fused._written_out(x, None, None, dy, made._numbers)[1:] == (None, None)


def test_numbers_follow_the_statistics() -> None:
    made = CompensatedLayerNorm(6, 0.5)
    assert made._numbers == (0.0, 0.0, 0.0, 0.5, 1 / 6)
    made.merge(torch.tensor([1.0, 3.0]))
    assert made._numbers == (2.0, 2 / 8, 12 / 64, 2 / 8 + 0.5, 1 / 8)
    made.eps = 0.25
    made.weight = nn.Parameter(torch.ones(2))
    assert made._numbers == (2.0, 2 / 4, 4 / 16, 2 / 4 + 0.25, 1 / 4)
    made.weight = made.bias = None
    made.normalized_shape = (6,)
    other = CompensatedLayerNorm(6, 0.25, elementwise_affine=False)
    other.load_state_dict(made.state_dict())
    assert other._numbers == copy.deepcopy(made)._numbers == made._numbers == (2.0, 2 / 8, 12 / 64, 0.5, 1 / 8)


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Other(Tensor):
    pass


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What `applies` says, on a machine whose CPU passes for a GPU; the module itself goes the usual way."""
    answers: list[bool] = []
    real = fused.applies
    monkeypatch.setattr(fused, "_ready", lambda device: True)

    def normalize(self: CompensatedLayerNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        answers.append(real(x, weight, bias))
        return usual(self, x, weight, bias)

    usual = CompensatedLayerNorm._normalize
    monkeypatch.setattr(CompensatedLayerNorm, "_normalize", normalize)
    return answers


def test_where_kernels_apply(seen: list[bool]) -> None:
    made, x = CompensatedLayerNorm(4), torch.randn(3, 4)
    for good in (x, x.requires_grad_(), torch.randn(2, 2, 4), torch.randn(4, 3).T):
        made(good)
    parametrize.register_parametrization(made, "weight", nn.Identity())
    made(x)
    assert seen == [True] * 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in forward AD
def test_where_kernels_do_not_apply(seen: list[bool]) -> None:
    made, x = CompensatedLayerNorm(4), torch.randn(3, 4)
    made(x.double()), made(x[:0]), made(x.as_subclass(Other))
    with Watches():
        made(x)
    torch.vmap(made)(x)
    torch.func.grad(lambda x: made(x).sum())(x)
    with forward_ad.dual_level():
        made(forward_ad.make_dual(x, x))
    copy.deepcopy(made).double()(x)
    strided = CompensatedLayerNorm(4)
    strided.weight = nn.Parameter(torch.ones(8)[::2])
    strided(x)
    wide = CompensatedLayerNorm(fused.MAX_WIDTH + 1)
    wide(torch.randn(1, fused.MAX_WIDTH + 1))
    assert seen == [False] * len(seen) and len(seen) == 10


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)  # torch's own
def test_who_traces_sees_plain_ops(seen: list[bool]) -> None:
    made, x = CompensatedLayerNorm(4), torch.randn(3, 4)
    torch.jit.trace(made, x, check_trace=False)
    torch.export.export(made, (x,), strict=False)
    assert seen and not any(seen)


def test_there_are_no_kernels_for_a_cpu() -> None:
    assert not fused.applies(torch.randn(3, 4), None, None)
