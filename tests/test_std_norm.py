"""Norms that divide by the standard deviation, and norms without a weight: known by what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from check import check, close, noisy, seeded
from torch import Tensor, nn

import squeeze_release as sr


class StdNorm(nn.Module):
    """timm's SimpleNorm."""

    def __init__(self, width: int, *, dim: int = -1, affine: bool = True, correction: int = 1) -> None:
        super().__init__()
        self.eps, self.dim, self.correction, self.normalized_shape = 1e-5, dim, correction, (width,)
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.var(self.dim, correction=self.correction, keepdim=True) + self.eps)
        if self.weight is None:
            return x
        return x * (self.weight if self.dim == -1 else self.weight[:, None, None])


class PlainRMSNorm(nn.Module):
    """Without a weight, as behind an encoder that ends in a norm of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps, self.normalized_shape = 1e-6, (width,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, None, self.eps)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def net(norm: nn.Module) -> nn.Sequential:
    seeded()
    return noisy(nn.Sequential(nn.Linear(6, 12), norm, nn.Linear(12, 5)))


def kill(model: nn.Sequential, *channels: int, bias: float | None = None) -> nn.Sequential:
    with torch.no_grad():
        model[0].weight[list(channels)] = 0
        if bias is not None:
            model[0].bias[list(channels)] = bias
    return model


@pytest.mark.parametrize("affine", [True, False])
def test_one_constant_carries_the_others(affine: bool) -> None:
    model = kill(net(StdNorm(12, affine=affine)), 1, 4, 7, 11)
    golden = {"0.out_features": 9, "1": sr.CompensatedStdNorm, "1.removed": 3, "2.in_features": 9}
    check(model, rand(3, 6), golden=golden)


def test_zeros_need_no_carrier() -> None:
    model = kill(net(StdNorm(12)), 1, 4, 7, bias=0.0)
    check(model, rand(3, 6), golden={"0.out_features": 9, "1.removed": 3, "2.in_features": 9})


def test_unread_constants_need_no_carrier_but_what_varies_stays() -> None:
    model = kill(net(StdNorm(12)), 1, 4)
    with torch.no_grad():
        model[2].weight[:, [1, 4, 8]] = 0  # 8 varies: it enters the variance
    check(model, rand(3, 6), golden={"0.out_features": 10, "1.removed": 2, "2.in_features": 10})


def test_channels_first() -> None:
    seeded()
    model = noisy(nn.Sequential(nn.Conv2d(3, 12, 3), StdNorm(12, dim=1), nn.Conv2d(12, 5, 1)))
    kill(model, 0, 5, 9)
    golden = {"0.out_channels": 10, "1": sr.CompensatedStdNorm, "2.in_channels": 10}
    check(model, rand(2, 3, 7, 7), golden=golden)


def test_all_constant() -> None:
    model = kill(net(StdNorm(12)), *range(12))
    _, report = check(model, rand(3, 6), gradients=False)
    assert report.params_after <= 24


def test_another_variance_is_another_norm() -> None:
    """Over C and not C - 1: nothing is known of it, so all channels stay."""
    model = kill(net(StdNorm(12, correction=0)), 1, 4, 7, bias=0.0)
    check(model, rand(3, 6), golden={"0.out_features": 12, "1": StdNorm, "2.in_features": 12})


def test_squeezed_twice_in_two_steps() -> None:
    """The second time constants are merged with those that went before."""
    model = kill(net(StdNorm(12)), 1, 4)
    with torch.no_grad():
        model[2].weight[:, [1, 4]] = 0
    small = sr.squeeze(model.double(), rand(3, 6)).model
    kill(small, 0, 3, bias=2.0)
    squeezed = check(small, rand(3, 6), golden={"0.out_features": 9, "1.removed": 3})
    x = rand(4, 6)
    close(squeezed.model(x), small(x))
    kill(small, *range(10))  # what went before still counts where all that is left is constant
    check(small, rand(3, 6), gradients=False)


def test_large_offsets_in_single_precision() -> None:
    model = kill(net(StdNorm(12)), 1, 4, 7)
    with torch.no_grad():
        model[0].bias += 30
    small = sr.squeeze(model.float(), torch.randn(3, 6)).model
    x = torch.randn(50, 6)
    exact = kill(net(StdNorm(12)), 1, 4, 7).double()
    with torch.no_grad():
        exact[0].bias.copy_(model[0].bias)
    close(small(x).double(), exact(x.double()), tol=1e-4)
    assert small.half()(x.half()).dtype == torch.half and torch.isfinite(small(x.half())).all()


def test_a_norm_without_a_weight() -> None:
    model = kill(net(PlainRMSNorm(12)), 1, 4, 7)
    golden = {"0.out_features": 10, "1": sr.CompensatedRMSNorm, "1.normalized_shape": (10,), "2.in_features": 10}
    check(model, rand(3, 6), golden=golden)


def test_a_norm_without_a_weight_keeps_what_varies() -> None:
    model = net(PlainRMSNorm(12))
    with torch.no_grad():
        model[2].weight[:, [1, 4, 7]] = 0
    check(model, rand(3, 6), golden={"0.out_features": 12, "1": PlainRMSNorm, "2.in_features": 12})


def test_saved_and_loaded(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), StdNorm(8), nn.Linear(8, 3)).double().eval()

    model = noisy(build())
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[2].weight[:, :3] = 0
    small = sr.squeeze(model, rand(2, 4)).model
    assert isinstance(small[1], sr.CompensatedStdNorm) and small[1].removed == 3
    sr.save(small, tmp_path / "net")
    x = rand(5, 4)
    assert torch.equal(sr.load(build(), tmp_path / "net")(x), small(x))
