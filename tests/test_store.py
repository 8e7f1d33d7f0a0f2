"""Saved and loaded: the same network to the bit, elsewhere and again; and nothing but an error from a bad file."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stored
import torch
from check import noisy
from nets import Net, dead, unread
from networks.families import case_of
from safetensors.torch import load_file
from stored import NETS, fc, residual, same, small_fc, small_residual, untouched
from torch import Tensor, nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release.modules import CompensatedLayerNorm, IndexedLinear, NarrowMultiheadAttention, PlacedLinear, Shift
from squeeze_release.store.standins import make

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW_START = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def test_the_same_logits_in_a_new_process(tmp_path):
    """After two squeezes with a step of training between."""
    compare_processes(["convnext_tiny", "encoder"], tmp_path)


@pytest.mark.slow  # for the imports
def test_the_same_logits_of_all_models_in_a_new_process(tmp_path):
    compare_processes(["convnext_tiny", "resnet18", "encoder", "llama", "bert"], tmp_path)


def compare_processes(names: list[str], folder: Path) -> None:
    here = {}
    for name in names:
        small = stored.squeezed_twice(name)
        sr.save(small, folder / f"{name}.safetensors")
        here[name] = stored.run(small, stored.inputs(name))
    where = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, stored.__file__, str(folder)], check=True, env=os.environ | SLOW_START | where)
    for name, outputs in here.items():
        there = load_file(folder / f"{name}.out")
        assert len(there) == len(outputs) and float(outputs[0].std()) > 0.01
        assert all(torch.equal(there[str(i)], output) for i, output in enumerate(outputs)), name


def test_tied_weights_and_rotary_tables_of_llama(tmp_path):
    small = stored.squeezed_twice("llama")
    sr.save(small, tmp_path / "net")
    loaded = sr.load(stored.llama().eval(), tmp_path / "net")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    same(small, loaded, stored.inputs("llama"))


@pytest.mark.parametrize("seed", [6, 20, 35, 43, 62])
def test_random_networks_come_back_and_give_the_same_file_again(seed, tmp_path):
    case = case_of(seed)
    fresh = other_weights(case.model)
    small = sr.squeeze(case.model, case.inputs, verify=False, compaction="index" if seed % 2 else None).model
    sr.save(small, tmp_path / "one")
    again = sr.load(fresh, tmp_path / "one")
    same(small, again)
    for call in case.calls:
        assert all(map(torch.equal, stored.tensors(small.eval()(*call)), stored.tensors(again.eval()(*call))))
    sr.save(again, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@torch.no_grad()
def other_weights(model: nn.Module) -> nn.Module:
    """A model as it is freshly built: no zeros, no statistics."""
    fresh = copy.deepcopy(model)
    for tensor in [*fresh.parameters(), *fresh.buffers()]:
        if tensor.is_floating_point():
            tensor.normal_()
    return fresh


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"inplace": True, "verify": False}], ids=str)
def test_however_it_was_squeezed(options, tmp_path):
    small, given = small_fc(**options), fc()
    before = copy.deepcopy(given)
    sr.save(small, tmp_path / "net")
    loaded = sr.load(given, tmp_path / "net")
    assert loaded[0].out_features == 5 and loaded[0].weight.shape == (5, 4)
    same(small, loaded, torch.randn(3, 4))
    untouched(given, before)
    assert not {p.data_ptr() for p in given.parameters()} & {p.data_ptr() for p in loaded.parameters()}


def test_a_model_that_was_never_squeezed(tmp_path):
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    sr.save(net, tmp_path / "net")
    same(net, sr.load(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), tmp_path / "net"), torch.randn(2, 3, 8, 8))


def test_a_loaded_network_trains_and_is_squeezed_and_saved_again(tmp_path):
    sr.save(small_fc(), tmp_path / "one")
    net = sr.load(fc(), tmp_path / "one")
    stored.step(net, torch.randn(2, 4))
    smaller = sr.squeeze(dead(net[0], 0) and net, torch.randn(2, 4)).model
    assert smaller[0].out_features == 4
    sr.save(copy.deepcopy(smaller), tmp_path / "two")
    same(smaller, sr.load(fc(), tmp_path / "two"), torch.randn(3, 4))


def test_masks_become_zeros(tmp_path):
    net = small_fc()
    prune.l1_unstructured(net[2], "weight", amount=0.5)
    sr.save(net, tmp_path / "net")
    assert hasattr(net[2], "weight_mask")
    loaded = sr.load(fc(), tmp_path / "net")
    assert torch.equal(loaded[2].weight, net[2].weight) and (loaded[2].weight == 0).sum() == 15


@pytest.mark.parametrize("name", NETS)
def test_stand_ins(name, tmp_path):
    build, squeezed, shape = NETS[name]
    small = squeezed()
    sr.save(small, tmp_path / "net")
    same(small, sr.load(build(), tmp_path / "net"), torch.randn(shape))
    expected = {"residual": {CompensatedLayerNorm, Shift, PlacedLinear}, "attention": {NarrowMultiheadAttention}}
    assert expected.get(name, set()) <= {type(module) for module in small.modules()}


def test_a_model_that_is_one_layer(tmp_path):
    net = noisy(nn.Linear(6, 4))
    unread(net, 1, 2)
    dead(net, 3)
    small = sr.squeeze(net, torch.randn(2, 6), compaction="index").model
    assert isinstance(small, IndexedLinear)
    sr.save(small, tmp_path / "net")
    same(small, sr.load(nn.Linear(6, 4), tmp_path / "net"), torch.randn(2, 6))


def test_shared_modules_and_tied_weights_are_stored_once(tmp_path):
    def build() -> nn.Module:
        lin, table = nn.Linear(6, 6), nn.Embedding(9, 6)
        net = Net(lambda s, i: s.head(s.b(s.a(s.table(i)).relu())), table=table, a=lin, b=lin, head=nn.Linear(6, 9))
        net.head.weight = table.weight
        return net

    net = build()
    with torch.no_grad():
        net.table.weight[:, 2] = 0
        dead(net.a, 2, bias=0)
    small = sr.squeeze(net, torch.arange(4)).model
    assert small.a.out_features == 5 and small.head.weight is small.table.weight
    sr.save(small, tmp_path / "net")
    assert len(load_file(tmp_path / "net")) == 4
    loaded = sr.load(build(), tmp_path / "net")
    assert loaded.head.weight is loaded.table.weight and loaded.a is loaded.b
    same(small, loaded, torch.arange(4))


def test_a_created_bias_and_frozen_parameters(tmp_path):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))

    net = noisy(build())
    dead(net[0], 2)
    net.requires_grad_(False)
    small = sr.squeeze(net, torch.randn(2, 4)).model
    sr.save(small, tmp_path / "net")
    loaded = sr.load(build(), tmp_path / "net")
    assert loaded[1].bias is not None and not loaded[1].bias.requires_grad
    same(small, loaded, torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_memory_format_and_all_buffers_are_those_of_the_file(dtype, tmp_path):
    def build() -> nn.Module:
        parts = {"conv": nn.Conv2d(3, 6, 3), "depthwise": nn.Conv2d(6, 6, 3, groups=6), "conv2": nn.Conv2d(6, 2, 3)}
        net = Net(lambda s, x: s.conv2(s.depthwise(s.conv(x) * s.wave[:, None, None])), **parts)
        net.register_buffer("wave", torch.linspace(0.1, 0.7, 6), persistent=False)
        return net

    net = noisy(build()).to(dtype).to(memory_format=torch.channels_last)
    dead(net.conv, 1, 4, bias=0)
    small = sr.squeeze(net, torch.randn(2, 3, 8, 8, dtype=dtype)).model
    sr.save(small, tmp_path / "net")
    loaded = sr.load(build(), tmp_path / "net")
    assert loaded.conv.weight.dtype == loaded.wave.dtype == dtype and len(loaded.wave) == len(small.wave)
    assert [p.stride() for p in loaded.parameters()] == [p.stride() for p in small.parameters()]
    assert loaded.conv.weight.is_contiguous(memory_format=torch.channels_last) and loaded.conv.out_channels == 4
    assert torch.equal(loaded.wave, small.wave)
    same(small, loaded, torch.randn(2, 3, 8, 8, dtype=dtype))


def test_the_mode_and_hooks_of_the_model_given(tmp_path):
    small, calls = small_residual().train(), []
    sr.save(small, tmp_path / "net")
    given = residual().eval()
    given.norm.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    loaded = sr.load(given, tmp_path / "net")
    loaded(torch.randn(2, 5))
    assert not any(module.training for module in loaded.modules()) and calls == [CompensatedLayerNorm]


@pytest.mark.parametrize("name", ["CompensatedLayerNorm", "CompensatedRMSNorm", "Shift", "Constant"])
def test_stand_ins_are_made_on_the_device_of_what_they_stand_for(name):
    numbers = {"outputs": 0} if name in ("Shift", "Constant") else {"eps": 1e-5, "normalized_shape": 3}
    numbers |= {"weight_offset": 0.0} if "RMS" in name else {}
    new = make(nn.LayerNorm(4, device="meta"), {"class": name, "channel_dim": -1, **numbers}, 4, "norm")
    assert {tensor.device.type for tensor in [*new.parameters(), *new.buffers()]} == {"meta"}


class Heads(nn.Module):
    """Keeps its number of heads in its class."""

    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


def test_numbers_that_the_class_gives(tmp_path):
    sr.register_attention(Heads, heads="heads")
    net = noisy(Heads())
    unread(net.out, 0, 1)
    small = sr.squeeze(net, torch.randn(2, 5, 8)).model
    assert small.heads == 3
    sr.save(small, tmp_path / "net")
    loaded = sr.load(Heads(), tmp_path / "net")
    assert loaded.heads == 3 and Heads.heads == 4
    same(small, loaded, torch.randn(2, 5, 8))


def test_a_recurrent_layer_sees_its_weights(tmp_path):
    def build() -> nn.Module:
        return Net(lambda s, x: s.out(s.rnn(x)[0]), rnn=nn.LSTM(4, 5, batch_first=True), out=nn.Linear(5, 2))

    net = build()
    sr.save(net, tmp_path / "net")
    same(net, sr.load(build(), tmp_path / "net"), torch.randn(2, 3, 4))


def test_a_cache_that_the_model_makes_when_it_runs(tmp_path):
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        if "ramp" not in s._buffers:
            s.register_buffer("ramp", torch.arange(4.0), persistent=False)
        return s.lin(x + s.ramp)

    net = Net(forward, lin=nn.Linear(4, 2))
    net(torch.randn(2, 4))
    sr.save(net, tmp_path / "net")
    assert "ramp" not in sr.load(Net(forward, lin=nn.Linear(4, 2)), tmp_path / "net")._buffers


def test_a_head_that_was_changed_by_hand_is_stored_too(tmp_path):
    small = small_fc()
    small[4] = nn.Linear(small[4].in_features, 2)
    sr.save(small, tmp_path / "net")
    same(small, sr.load(fc(), tmp_path / "net"), torch.randn(2, 4))


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    sr.save(small_fc(), tmp_path / "net")
    before = (tmp_path / "net").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        sr.save(noisy(fc()), tmp_path / "net")
    assert [path.name for path in tmp_path.iterdir()] == ["net"] and (tmp_path / "net").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_others_may_read_it_as_the_umask_says(tmp_path):
    sr.save(fc(), tmp_path / "net")
    (tmp_path / "plain").touch()
    assert (tmp_path / "net").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "net")
    sr.save(small_fc(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "net").exists()
