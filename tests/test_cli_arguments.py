"""MODEL, CHECKPOINT and --input."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
import typer
from check import noisy
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release.cli import checkpoints, inputs, models

# --- MODEL -----------------------------------------------------------------------------------------------------------


def test_models_of_libraries(tmp_path: Path) -> None:
    net = models.build("timm:convnext_tiny?num_classes=3&depths=[1,1,1,1]&dims=[4,4,4,4]&norm_layer=layernorm2d")
    assert net.head.fc.out_features == 3 and len(net.stages[2].blocks) == 1
    assert models.build("torchvision:squeezenet1_0?num_classes=3").classifier[1].out_channels == 3
    for name, kind in (("bert", "BertModel"), ("llama", "LlamaForCausalLM")):
        config = stored.MODELS[name]().config
        config.architectures = [kind] if name == "llama" else None
        config.save_pretrained(tmp_path / name)
        assert type(models.build(f"transformers:{tmp_path / name}")).__name__ == kind
    config.architectures = ["pipeline"]  # of transformers, but no model
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(sr.InputError, match="has no model pipeline"):
        models.build(f"transformers:{tmp_path / 'other'}")


def test_models_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("mine").mkdir()
    Path("mine/nets.py").write_text("from torch import nn\nclass A:\n  make = staticmethod(nn.Linear)\nnot_one = 3\n")
    Path("mine/broken.py").write_text("import nothing_of_the_kind\n")
    assert models.build("mine.nets:A.make?in_features=2&out_features=3").out_features == 3
    for text, words in (
        ("mine.nets:absent", "AttributeError: module 'mine.nets' has no attribute 'absent'"),
        ("mine.nets:not_one", "it gave a int, not a torch.nn.Module"),
        ("mine.nets:A.make?in_features=2", "TypeError"),
        ("mine.broken:net", "mine.broken cannot be imported: No module named 'nothing_of_the_kind'"),
        ("absent.nets:net", "absent.nets cannot be imported"),
        ("timm:no_such_net", "no_such_net"),
        ("torchvision:no_such_net", "no_such_net"),
        (f"transformers:{tmp_path}", "there is no config.json"),
    ):
        with pytest.raises(sr.InputError) as error:
            models.build(text)
        assert words in error.value.what and error.value.remedy
    for text in ("resnet18", "timm:", ":net", "", "timm:?num_classes=3"):
        with pytest.raises(typer.BadParameter, match="names no model"):
            models.build(text)


def test_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*models.complete("t")] == ["timm:", "torchvision:", "transformers:"]
    assert [*models.complete("timm:convnext_t")][:2] == ["timm:convnext_tiny", "timm:convnext_tiny_hnf"]
    assert "torchvision:resnet18" in [*models.complete("torchvision:resnet1")]
    assert [*models.complete("transformers:x")] == [] == [*models.complete("my.package:x")]
    monkeypatch.setitem(sys.modules, "timm", None)  # cannot be imported
    assert [*models.complete("timm:convnext_t")] == []


# --- --input ---------------------------------------------------------------------------------------------------------


def test_inputs() -> None:
    net = nn.Sequential(nn.Embedding(7, 2), nn.Embedding(3, 2))
    texts = ["2x3", "4x50:int64", "4x50:int32:2", "mask=2x2:bool", "other_1=5:float16", "1:uint8"]
    args, kwargs = inputs.draw(inputs.parse(texts), net, torch.float64)
    again, _ = inputs.draw(inputs.parse(texts), net, torch.float64)
    assert all(map(torch.equal, args, again))
    assert [(tuple(t.shape), t.dtype) for t in args] == [
        ((2, 3), torch.float64),
        ((4, 50), torch.int64),
        ((4, 50), torch.int32),
        ((1,), torch.uint8),
    ]
    assert int(args[1].max()) == 6 and int(args[2].max()) == 1 and int(args[1].min()) == 0
    assert kwargs["mask"].all() and kwargs["other_1"].dtype is torch.float16


NONE = "|x|2x|2x-3|2,3|2x3:int|2x3:int64:|2x3:int64:0|2x3:float32:5|=2x3|1a=2x3|2x3:Int64|0x3".split("|")


@pytest.mark.parametrize("text", NONE)
def test_inputs_that_are_none(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        inputs.parse([text])


def test_inputs_that_cannot_be() -> None:
    with pytest.raises(typer.BadParameter, match="there is none"):
        inputs.parse([])
    with pytest.raises(typer.BadParameter, match="twice"):
        inputs.parse(["a=2", "a=3"])
    with pytest.raises(typer.BadParameter, match="2x3:int64:1000"):
        inputs.draw(inputs.parse(["2x3:int64"]), nn.Linear(2, 2), torch.float32)


# --- CHECKPOINT ------------------------------------------------------------------------------------------------------


def written(state: Any, folder: Path, name: str = "net.pt") -> str:
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {"model_state_dict": OrderedDict(state)},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.module.{name}": tensor for name, tensor in state.items()}},
    ],
)
def test_weights_however_they_are_wrapped(wrap: Any, tmp_path: Path) -> None:
    net = noisy(stored.fc())
    stored.same(net, checkpoints.with_weights(stored.fc(), written(wrap(net.state_dict()), tmp_path)))
    if all(isinstance(tensor, torch.Tensor) for tensor in wrap(net.state_dict()).values()):
        path = written(wrap(net.state_dict()), tmp_path, "net.safetensors")
        stored.same(net, checkpoints.with_weights(stored.fc(), path))


def test_masks_of_prune_become_exact_zeros(tmp_path: Path) -> None:
    net = noisy(stored.fc())
    prune.random_unstructured(net[0], "weight", 0.5)
    prune.random_unstructured(net[0], "bias", 0.5)
    net[2].weight_orig = net[2].weight  # half of a pair is a name like any other
    path = written({k: v for k, v in net.state_dict().items() if k != "2.weight_orig"}, tmp_path)
    loaded = checkpoints.with_weights(stored.fc(), path)
    assert torch.equal(loaded[0].weight, net[0].weight) and torch.equal(loaded[0].bias, net[0].bias)
    zeros = loaded[0].weight[net[0].weight_mask == 0]
    assert len(zeros) == 16 and not torch.signbit(zeros).any()
    with pytest.raises(sr.InputError, match="not one of this model") as error:
        checkpoints.with_weights(stored.fc(), written(net.state_dict(), tmp_path))
    assert "1 unexpected: 2.weight_orig" in str(error.value)
    bad = {**stored.fc().state_dict(), "0.weight_orig": torch.ones(8, 4), "0.weight_mask": torch.full((8, 4), 0.5)}
    del bad["0.weight"]
    with pytest.raises(sr.MaskError, match="values other than 0 and 1"):
        checkpoints.with_weights(stored.fc(), written(bad, tmp_path))


def test_tied_weights_and_old_batch_norms(tmp_path: Path) -> None:
    llama = noisy(stored.llama())
    state = {name: tensor for name, tensor in llama.state_dict().items() if name != "lm_head.weight"}
    stored.same(llama, checkpoints.with_weights(stored.llama(), written(state, tmp_path, "net.safetensors")))
    norm = nn.BatchNorm1d(3)
    state = {name: tensor for name, tensor in norm.state_dict().items() if name != "num_batches_tracked"}
    checkpoints.with_weights(nn.BatchNorm1d(3), written(state, tmp_path))


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    state = stored.fc().state_dict()
    state["extra"] = state.pop("2.bias")
    state["0.weight"] = torch.zeros(3, 4)
    net = stored.fc()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(sr.InputError) as error:
        checkpoints.with_weights(net, written(state, tmp_path))
    for words in ("1 missing: 2.bias", "1 unexpected: extra", "1 of another shape: 0.weight is 3x4, in the model 8x4"):
        assert words in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    many = {f"layer{i}": torch.zeros(1) for i in range(20)}
    with pytest.raises(sr.InputError, match="layer7, and 12 more"):
        checkpoints.with_weights(net, written(many, tmp_path))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_files_that_are_no_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "executed"))
    evil = written({"state_dict": stored.fc().state_dict(), "more": Evil()}, tmp_path, "evil.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
    zipped = Path(written(stored.fc().state_dict(), tmp_path, "cut.pt"))
    zipped.write_bytes(zipped.read_bytes()[:300])
    for path, words in (
        (evil, "weights_only=True) refuses it"),
        (written(stored.fc(), tmp_path, "whole.pt"), "weights_only=True) refuses it"),
        (written([torch.ones(2)], tmp_path, "list.pt"), "it holds a list, not a state dict"),
        (written({"epoch": 3, 4: torch.ones(2)}, tmp_path, "numbers.pt"), "no tensors: epoch, 4"),
        (written({}, tmp_path, "nothing.pt"), "no tensors"),
        (tmp_path / "empty.pt", "CHECKPOINT"),
        (tmp_path / "text.pt", "CHECKPOINT"),
        (tmp_path / "cut.pt", "CHECKPOINT"),
        (tmp_path / "cut.safetensors", "not a whole safetensors file"),
        (tmp_path / "absent.pt", "there is no such file"),
        (tmp_path, "there is no such file"),
    ):
        with pytest.raises(sr.InputError) as error:
            checkpoints.with_weights(stored.fc(), str(path))
        assert words in str(error.value) and "nothing of the file was executed" in error.value.consequence
    assert not (tmp_path / "executed").exists()
