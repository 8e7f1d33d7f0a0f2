"""Convolutions that compute their weight from their parameters: weight standardisation."""

from __future__ import annotations

from pathlib import Path

import torch
from check import check, noisy
from nets import Net, dead, rand, unread
from torch import Tensor, nn
from torch.nn import functional as F

import squeeze_release as sr


class Standardised(nn.Conv2d):
    """timm's ScaledStdConv2d."""

    def __init__(self, *args: int, **options: int) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def computed(self) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        scale = (self.gain * self.weight[0].numel() ** -0.5).view(-1)
        return F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0).reshape_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.computed(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Cast(Standardised):
    """Standardised in single precision: not to be had in another one."""

    def computed(self) -> Tensor:
        return super().computed().float().to(self.weight.dtype)


class Padding(Standardised):
    """Does more than convolve."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0)))


def net(kind: type[nn.Conv2d] = Standardised) -> nn.Sequential:
    stages = [nn.Conv2d(3, 6, 1), nn.ReLU(), kind(6, 8, 3, padding=1, stride=2), nn.ReLU(), kind(8, 5, 1)]
    return noisy(nn.Sequential(*stages, nn.Conv2d(5, 2, 1)))  # type: ignore[return-value]


def image() -> Tensor:
    return rand(2, 3, 7, 7)


def test_a_dead_filter_in_front_takes_its_column_along() -> None:
    """The column of W is not 0 and counts in the mean of every filter; with the computed weight it is a column."""
    model = net()
    dead(model[0], 1, 4, bias=-1.0)  # nothing, after the ReLU
    model[2].gain.data[3] = 0  # a filter of zeros
    model[2].bias.data[3] = -0.5
    golden = {
        "0.out_channels": 4,
        "2": nn.Conv2d,
        "2.weight": (7, 4, 3, 3),
        "2.stride": (2, 2),
        "4.weight": (5, 7, 1, 1),
    }
    small = check(model, image(), golden=golden, gradients=False).model
    assert not hasattr(small[2], "gain") and small[2].bias is not None


def test_a_column_of_zeros_is_none_once_it_is_standardised() -> None:
    model = net()
    unread(model[2], 1)
    check(model, image(), golden={"0.out_channels": 6, "2": Standardised, "2.weight": (8, 6, 3, 3)})


def test_what_loses_nothing_stays_as_it_is() -> None:
    model = net()
    unread(model[5], 2)
    golden = {"2": Standardised, "4": nn.Conv2d, "4.weight": (4, 8, 1, 1), "5.in_channels": 4}
    check(model, image(), golden=golden, gradients=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Standardised(6, 4, 1), Standardised(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def test_a_dead_block_does_not_hold_on_to_its_stream() -> None:
    model = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), Block(), nn.Conv2d(6, 2, 1)))
    dead(model[0], 1)
    model[1].outer.gain.data.zero_()
    check(model, image(), golden={"0.out_channels": 5, "1": sr.modules.Shift}, gradients=False)


def test_a_block_with_one_living_filter_does() -> None:
    model = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), Block(), nn.Conv2d(6, 2, 1)))
    model[1].outer.gain.data[[0, 2, 3, 4, 5]] = 0
    golden = {"0.out_channels": 6, "1.inner.weight": (4, 6, 1, 1), "1.inner": Standardised}
    check(model, image(), golden=golden)


def test_a_weight_computed_in_single_precision_stays() -> None:
    model = net(Cast)
    dead(model[0], 1, bias=-1.0)
    small = sr.squeeze(model.double(), image(), verify=False).model  # in float64 nothing is cast, so it cannot compare
    assert type(small[2]) is Cast and small[2].weight.shape == (8, 6, 3, 3)


def test_a_convolution_that_does_more_stays() -> None:
    model = net(Padding)
    dead(model[0], 1, bias=-1.0)
    check(model, image(), golden={"2": Padding, "0.out_channels": 6})


def test_a_weight_that_another_layer_reads_stays() -> None:
    first, second = Standardised(6, 6, 1), Standardised(6, 6, 1)
    second.weight = first.weight
    model = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), first, nn.ReLU(), second, nn.Conv2d(6, 2, 1)))
    dead(model[0], 1, bias=-1.0)
    check(model, image(), golden={"2": Standardised, "4": Standardised, "0.out_channels": 6})


def test_a_weight_that_depends_on_the_input_stays() -> None:
    def run(s: nn.Module, x: Tensor) -> Tensor:
        return s.out(F.conv2d(torch.relu(s.lin(x)), s.inner.weight * x.mean()))  # type: ignore[operator]

    model = noisy(Net(run, lin=nn.Conv2d(3, 6, 1), inner=nn.Conv2d(6, 4, 1), out=nn.Conv2d(4, 2, 1)))
    dead(model.lin, 1, bias=-1.0)
    check(model, image(), golden={"lin.out_channels": 6, "inner.weight": (4, 6, 1, 1)})


def test_the_rules_of_the_paper_leave_it_as_it_is() -> None:
    model = net()
    dead(model[0], 1, bias=-1.0)
    check(model, image(), golden={"2": Standardised, "0.out_channels": 6}, rules="paper")


def test_one_that_became_plain_is_saved_and_loaded(tmp_path: Path) -> None:
    model, x = net().double(), image().double()
    dead(model[0], 1, 4, bias=-1.0)
    small = sr.squeeze(model.eval(), x).model
    assert type(small[2]) is nn.Conv2d
    sr.save(small, tmp_path / "net")
    loaded = sr.load(net().double().eval(), tmp_path / "net")
    assert torch.equal(loaded(x), small(x)) and type(loaded[2]) is nn.Conv2d
