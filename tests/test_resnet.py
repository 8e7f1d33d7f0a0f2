"""Residual CNNs under filter masks: the width of every layer is what the planted mask allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from check import assert_same, check
from counting import size
from resnets import (
    Block,
    CifarResNet,
    compact_size,
    created_biases,
    dense_size,
    inner_width,
    plant,
    resnet18,
    zero_weakest_half,
)
from torch import Tensor

import squeeze_release as sr

F64 = torch.float64
TORCH_SIMPLIFY = 4_059_000  # parameters, on the unaligned mask without fused norms, at one resolution only


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("constants", ["zero", "positive"])
def test_resnet18_is_as_small_as_the_mask_allows(aligned: bool, constants: str) -> None:
    net = resnet18(constants).double()
    alive = plant(net, aligned)
    small, report = check(net, torch.randn(1, 3, 64, 64, dtype=F64), gradients=False)
    assert size(small) - created_biases(small) == dense_size(net, alive, carrier=int(constants == "positive"))
    assert_same(net, small, (torch.randn(2, 3, 96, 80, dtype=F64),), {})
    assert report.params_before == 11_181_642


@pytest.mark.parametrize("constants", ["zero", "positive"])
def test_compaction_goes_below_torch_simplify(constants: str) -> None:
    net = resnet18(constants).double()
    alive = plant(net, aligned=False)
    small, report = check(net, torch.randn(1, 3, 64, 64, dtype=F64), gradients=False, compaction="index")
    assert report.params_after < TORCH_SIMPLIFY
    shortcuts = sum(len(block[0].downsample[0].place) for block in (small.layer2, small.layer3, small.layer4))
    created = shortcuts if constants == "positive" else 0  # constants fold into the bias of a 1x1 convolution
    carrier = int(constants == "positive")
    least, most = (compact_size(net, alive, carrier, own) for own in (0, carrier))
    assert least <= report.params_after - created <= most <= least + 2 * 14
    assert_same(net, small, (torch.randn(2, 3, 96, 80, dtype=F64),), {})


def checkpoint(name: str) -> dict[str, Tensor]:
    """Trained weights: $SQUEEZE_RELEASE_CHECKPOINTS, or shared/checkpoints beside the repository."""
    beside = Path(__file__).parents[2] / "shared" / "checkpoints"
    path = Path(os.environ.get("SQUEEZE_RELEASE_CHECKPOINTS", beside)) / name
    if not path.exists():
        pytest.skip(f"{name} is not there")
    loaded: dict[str, Tensor] = pytest.importorskip("safetensors.torch").load_file(path)
    return loaded


@pytest.mark.parametrize("compaction", [None, "index"])
def test_a_trained_resnet56(compaction: str | None) -> None:
    net = CifarResNet(9)
    net.load_state_dict(checkpoint("resnet56_cifar10.safetensors"))
    zero_weakest_half(net)
    net.double().eval()
    small, report = sr.squeeze(net, torch.randn(2, 3, 32, 32, dtype=F64), compaction=compaction)
    assert report.params_after < 0.75 * report.params_before
    for old, new in zip(net.modules(), small.modules(), strict=True):
        if isinstance(old, Block):
            assert new.conv1.weight.size(0) == inner_width(old, carrier=compaction is None)
    for pixels in (32, 40):
        assert_same(net, small, (torch.randn(4, 3, pixels, pixels, dtype=F64),), {})
