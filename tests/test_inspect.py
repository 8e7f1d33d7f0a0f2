"""What squeeze would do, and why each layer is as wide as it is; the model is left alone."""

from __future__ import annotations

import copy
import json

import pytest
import stored
import torch
from check import noisy
from nets import dead, unread
from torch import nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release.report import Width


def chain() -> nn.Sequential:
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    dead(net[0], 1, 5)  # constants, that fold
    unread(net[4], 2)
    return net


def test_widths_and_reasons_of_a_chain() -> None:
    found = sr.inspect(chain(), torch.randn(2, 4))
    assert found.widths == (
        Width("0", 8, 6, 6, 1, 1, (("2 (aten.linear): reads it", 6),)),
        Width("2", 6, 5, 5, 1, 1, (("4 (aten.linear): reads it", 5),)),
        Width("4", 3, 3, 3, 1, 0, (("output: an output of the model", 3),)),
    )


def test_it_is_what_squeeze_then_does_and_the_model_is_left_alone() -> None:
    for build, x in ((chain, torch.randn(2, 4)), (masked_residual, torch.randn(2, 5))):
        model = build()
        before = copy.deepcopy(model)
        found = sr.inspect(model, x, compaction="index")
        stored.untouched(model, before)
        report = sr.squeeze(model, x, compaction="index").report
        assert found.report.layers == report.layers and found.widths == report.widths
        assert found.report.after == report.after and found.report.max_error is None


def masked_residual() -> nn.Module:
    net = noisy(stored.residual())
    dead(net.stem, 0, 1)
    dead(net.block.body[3], 0, 1, 2, 3)
    for layer in (net.block.body[1], net.mix.body, net.shift.body, net.out):
        unread(layer, 0)
    return net


def test_a_stream_has_several_writers_and_zeros_that_others_fill() -> None:
    widths = {width.name: width for width in sr.inspect(masked_residual(), torch.randn(2, 5)).widths}
    stem, out = widths["stem"], widths["out"]
    assert (stem.before, stem.after, stem.writers) == (8, 8, 4) and stem.alive == 6
    assert stem.readers == 4 and out.readers == 0  # block, mix, shift and out
    assert sum(count for _, count in stem.why) == 8


def test_a_layer_that_gathers_its_inputs_reads_them() -> None:
    """As depthwise convolutions of ConvNeXt do, where they are narrower than their stream."""
    model, x = stored.prune(noisy(stored.convnext_tiny()).eval(), 0), stored.inputs("convnext_tiny")
    widths = {width.name: width for width in sr.inspect(model, x).widths}
    assert widths["stages.1.blocks.0.conv_dw"].after < widths["stages.1.downsample.1"].after
    assert widths["stages.1.downsample.1"].readers == 2  # that one, and the next downsampling


def test_masks_stay_on_and_keep_is_heeded() -> None:
    net = chain()
    prune.random_structured(net[0], "weight", amount=0.5, dim=0)
    found = sr.inspect(net, torch.randn(2, 4), keep=["0"])
    assert found.widths[0].after == 8 and hasattr(net[0], "weight_mask")
    with pytest.raises(sr.InputError, match="keep names no module"):
        sr.inspect(net, torch.randn(2, 4), keep=["nobody"])


def test_it_prints_and_goes_to_json() -> None:
    found = sr.inspect(stored.small_residual(), torch.randn(2, 5))
    text = str(found)
    assert "writers" in text and "reads it" in text and "all parameters" in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["widths"][0]["name"] == "stem" and data["after"]["params"] == found.report.params_after
    assert "nothing could be removed" not in text
