"""What is known up to shared functions stays known: through scales and shifts, batch norm, concat; not through more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.facts import MIXED, Span
from squeeze_release.rules.pool import keep_uniform

PAD = nn.ZeroPad2d(1)


def between(code: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    """A convolution, zero padding, then the code; the dead channels are no constants behind the padding."""
    net = Net(
        lambda s, x: s.out(code(s, s.pad(s.conv(x)))),
        conv=nn.Conv2d(3, 8, 3),
        pad=PAD,
        scale=nn.Parameter(torch.randn(8, 1, 1)),
        out=nn.Conv2d(8, 5, 3),
        **parts,
    )
    noisy(net)
    dead(net.conv, 1, 2, 5)
    return net


@pytest.mark.parametrize(
    "code",
    [
        lambda s, x: x * s.scale,
        lambda s, x: s.scale * x,
        lambda s, x: x + s.scale,
        lambda s, x: s.scale + x,
        lambda s, x: x - s.scale,
        lambda s, x: s.scale - x,
        lambda s, x: x / s.scale,
        lambda s, x: 2 * x - 0.5,
        lambda s, x: 0.5 - x / 3,
        lambda s, x: torch.rsub(x, s.scale),
        lambda s, x: x.mul_(s.scale).add_(1.5),
    ],
)
def test_scales_and_shifts_keep_one_carrier(code: Callable[[nn.Module, Tensor], Tensor]) -> None:
    squeezed = check(between(code), rand(1, 3, 8, 8), golden={"conv.out_channels": 6, "out.in_channels": 6})
    assert squeezed.report.carriers == 1


@pytest.mark.parametrize(
    "code",
    [
        lambda s, x: s.scale / (x + 9),
        lambda s, x: x * x,
        lambda s, x: x * x.mean(1, keepdim=True),
        lambda s, x: torch.maximum(x, s.scale),
        lambda s, x: x.sigmoid(),
    ],
)
def test_other_arithmetic_keeps_all(code: Callable[[nn.Module, Tensor], Tensor]) -> None:
    check(between(code), rand(1, 3, 8, 8), golden={"conv.out_channels": 8})


def test_numbers_that_differ_from_place_to_place_keep_all() -> None:
    net = between(lambda s, x: x * s.table, table=nn.Parameter(torch.randn(8, 8, 8)))
    check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 8})


def test_batch_norm_scales_and_shifts() -> None:
    net = between(lambda s, x: s.norm(x), norm=nn.BatchNorm2d(8))
    squeezed = check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 6, "norm.num_features": 6})
    assert squeezed.report.carriers == 1


def test_batch_norm_between_a_layer_norm_and_its_reader() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4, 6, 7)
    squeezed = check(net, rand(3, 4), golden={"0.out_features": 6, "1": sr.CompensatedLayerNorm, "3.in_features": 6})
    assert squeezed.report.carriers == 2


def test_a_layer_scale_behind_an_rms_norm() -> None:
    net = Net(
        lambda s, x: s.out(s.norm(s.lin(x)) * s.scale),
        lin=nn.Linear(4, 9),
        norm=nn.RMSNorm(9),
        scale=nn.Parameter(torch.randn(9)),
        out=nn.Linear(9, 3),
    )
    noisy(net)
    dead(net.lin, 1, 2, 4, 6)
    assert check(net, rand(3, 4), golden={"lin.out_features": 6, "scale": (6,)}).report.carriers == 1


def test_concat_with_constants_and_varying_channels() -> None:
    """One function, of the first piece; the constant of the second folds, what varies stays."""
    net = Net(
        lambda s, x: s.out(torch.cat([s.norm(s.one(x)), s.two(x)], -1)),
        one=nn.Linear(4, 8),
        two=nn.Linear(4, 6),
        norm=nn.RMSNorm(8),
        out=nn.Linear(14, 3),
    )
    noisy(net)
    dead(net.one, 1, 2, 5)
    dead(net.two, 0, 3)
    golden = {"one.out_features": 6, "two.out_features": 4, "out.in_features": 10}
    assert check(net, rand(3, 4), golden=golden).report.carriers == 1


def test_concat_of_two_norms_has_two_functions() -> None:
    net = Net(
        lambda s, x: s.out(torch.cat([s.first(s.one(x)), s.second(s.two(x))], -1)),
        one=nn.Linear(4, 8),
        two=nn.Linear(4, 8),
        first=nn.RMSNorm(8),
        second=nn.RMSNorm(8),
        out=nn.Linear(16, 3),
    )
    noisy(net)
    dead(net.one, 1, 2, 5)
    dead(net.two, 0, 3, 4)
    golden = {"one.out_features": 6, "two.out_features": 6, "out.in_features": 12}
    assert check(net, rand(3, 4), golden=golden).report.carriers == 2


def test_concat_along_tokens_mixes_functions_and_keeps_all() -> None:
    net = Net(
        lambda s, x: s.out(torch.cat([s.norm(y := s.lin(x)), y], 1)),
        lin=nn.Linear(4, 8),
        norm=nn.RMSNorm(8),
        out=nn.Linear(8, 3),
    )
    noisy(net)
    dead(net.lin, 1, 2, 5)
    check(net, rand(2, 3, 4), golden={"lin.out_features": 8})


# --------------------------------------------------------------------------- channels and positions along one dimension


def folded(code: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer norm over channels, the code, and a 1x1 convolution: two carriers speak for all constants."""
    net = Net(
        lambda s, x: s.out(code(s.norm(s.lin(x)))),
        lin=nn.Linear(3, 8),
        norm=nn.LayerNorm(8),
        out=nn.Conv1d(8, 5, 1),
    )
    noisy(net)
    dead(net.lin, 1, 2, 5, 6)
    return net


def test_known_through_a_reshape_that_mixes_channels_and_positions() -> None:
    """MobileViT's fold: (B, N, C) -> (B C, N) -> (B, C, N)."""
    net = folded(lambda y: y.transpose(1, 2).reshape(-1, 2, 3).reshape(2, -1, 6))
    check(net, rand(2, 6, 3), golden={"lin.out_features": 6, "out.in_channels": 6})


def test_not_known_through_a_mean_of_what_is_mixed() -> None:
    net = folded(lambda y: y.reshape(2, 6, 4, 2).mean(3).repeat_interleave(2, 2).transpose(1, 2))
    check(net, rand(2, 6, 3), golden={"lin.out_features": 8})


def test_positions_must_be_the_same_for_all_channels() -> None:
    """Rolled along channels and positions at once: by whole rows all channels move alike, else they part."""
    numbers = torch.randn(1, 8, dtype=torch.float64).expand(6, 8)
    span = Span(1, numbers, (numbers,))
    flat = span.moved(lambda t: t.reshape(48))
    assert flat is not None and flat.dim == MIXED
    for steps, dim in ((16, 1), (0, 1), (3, MIXED), (-1, MIXED)):
        turned = flat.moved(lambda t, by=steps: t.roll(by))
        assert turned is not None
        back = turned.moved(lambda t: t.reshape(6, 8))
        assert back is not None and back.dim == dim
    assert flat.moved(lambda t: keep_uniform(t, (0,))) is None
