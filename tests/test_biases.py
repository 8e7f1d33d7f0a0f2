"""Layers without a bias: those that would use one get one, the others keep their constants."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import dead, rand
from torch import Tensor, nn


class Own(nn.Linear):
    """As timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Cast(nn.Linear):
    """With a bias its code takes another path."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return F.linear(x, self.weight, bias)


class Same(nn.Conv2d):
    """Pads by itself, with reflections, so that constants stay constants."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(F.pad(x, (1, 1, 1, 1), "reflect"), self.weight, self.bias)


class Deaf(nn.Linear):
    """Has no ear for a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + 2 * self.bias


class Rectified(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


class Raises(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is None
        return F.linear(x, self.weight)


def test_a_forward_of_its_own_that_adds_a_bias_gets_one() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Own(8, 3, bias=False)))
    dead(net[0], 1, 2, 5)
    check(net, rand(2, 4), golden={"0.out_features": 5, "2": Own, "2.bias": (3,)})


@pytest.mark.parametrize(("layer", "left"), [(Cast, 8), (Deaf, 6), (Doubled, 6), (Rectified, 6), (Raises, 6)])
def test_one_that_does_not_keeps_one_constant_for_all(layer: type[nn.Linear], left: int) -> None:
    """It carries the others in the weight, unless that is computed."""
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), layer(8, 3, bias=False)))
    dead(net[0], 1, 2, 5)
    check(net, rand(2, 4), golden={"0.out_features": left, "2.bias": None})


def test_a_convolution_that_pads_by_itself() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), Same(8, 3, 3, bias=False)))
    dead(net[0], 1, 2, 5)
    check(net, rand(1, 3, 7, 7), golden={"0.out_channels": 5, "2": Same, "2.bias": (3,)})


def test_what_is_tried_leaves_the_layer_as_it_was() -> None:
    layer = Own(8, 3, bias=False)
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda _, __, y: seen.append(y))
    from squeeze_release.analyse.biases import can_take_bias

    before = layer.weight.clone()
    assert can_take_bias(layer, (3, 8))
    assert layer.bias is None and torch.equal(layer.weight, before) and not seen
