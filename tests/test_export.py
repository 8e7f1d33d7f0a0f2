"""Exported files compute what the network computes, without this package; or there is an error and no file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import elsewhere
import onnx
import pytest
import stored
import torch
from check import noisy
from nets import Net
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release import export as export_function
from squeeze_release.modules import Constant, IndexedConv2d, IndexedLinear, Passthrough, PlacedConv2d, Shift
from squeeze_release.store.standins import STAND_INS

SUFFIXES = [".onnx", ".pt2"]


def run_elsewhere(folder: Path) -> None:
    subprocess.run([sys.executable, "-I", elsewhere.__file__, str(folder)], check=True)


def check_elsewhere(model: nn.Module, x: Tensor, path: Path) -> None:
    """Outputs that `elsewhere.py` left, at the batch of x and at 1."""
    for name, given in ((f"{path.name}.out", x), (f"{path.name}.out1", x[:1])):
        outputs, expected = load_file(path.parent / name), stored.run(model, given)
        assert len(outputs) == len(expected) > 0
        for i, value in enumerate(expected):
            assert float((outputs[str(i)] - value).abs().max()) <= 1e-5 * float(value.abs().max()), (path, i)


def test_files_run_where_the_package_cannot_be_imported(tmp_path: Path) -> None:
    """With a compensated norm, a shift, layers that gather and place, and narrow attention: plain operators all."""
    made = {name: (small().eval(), torch.randn(shape)) for name, (_, small, shape) in [*stored.NETS.items()][1:]}
    for name, (net, x) in made.items():
        for suffix in SUFFIXES:
            done = sr.export(net, x, tmp_path / f"{name}{suffix}")
            assert done.max_error is not None and done.max_error <= 1e-5 and done.batches == (3, 1)
            assert done.bytes == done.path.stat().st_size
        assert {node.domain for node in onnx.load(tmp_path / f"{name}.onnx").graph.node} == {""}
        called = [node.target for node in torch.export.load(done.path).graph.nodes if node.op == "call_function"]
        assert {op.namespace for op in called if isinstance(op, torch._ops.OpOverload)} == {"aten"}
        save_file({"0": x}, tmp_path / f"{name}.inputs")
    run_elsewhere(tmp_path)
    for name, (net, x) in made.items():
        for suffix in SUFFIXES:
            check_elsewhere(net, x, tmp_path / f"{name}{suffix}")
    assert {path.suffix for path in tmp_path.iterdir()} == {*SUFFIXES, ".inputs", ".out", ".out1"}


def test_every_module_of_ours_in_one_network(tmp_path: Path) -> None:
    first = {"channel_dim": 1}
    norms = [sr.CompensatedGroupNorm(6), sr.CompensatedLayerNorm(6, **first), sr.CompensatedStdNorm(6, **first)]
    rms = sr.CompensatedRMSNorm(5)
    for norm in [*norms, rms]:
        norm.merge(torch.tensor([0.5, -2.0, 1.0]))
    convs = [
        IndexedConv2d(6, 7, 3, index=torch.tensor([0, 5, 5, 2, 1, 3])),
        PlacedConv2d(7, 4, 1, place=torch.tensor([5, 0, 1, 2, 3, 4]), fill=torch.tensor([0.3, -0.2])),
    ]
    shifts = [Shift(torch.randn(6), **first), Passthrough(), Shift(torch.randn(5))]
    last = [rms, IndexedLinear(5, 4, index=torch.tensor([4, 3, 0, 1, 1]))]
    parts = {"body": nn.Sequential(*norms, *convs, *shifts, *last), "constant": Constant(torch.randn(4))}
    net = noisy(Net(lambda s, x: s.body(x) + s.constant(x.mean((1, 2)))[:, None, None], **parts))
    used = {type(module).__name__ for module in net.modules()}
    elsewhere_tested = {"NarrowMultiheadAttention", "PlacedLinear"}  # and other dimensions of convolutions are alike
    assert {name for name in STAND_INS if not name.endswith(("1d", "3d"))} - used == elsewhere_tested
    for suffix in SUFFIXES:
        sr.export(net, torch.randn(2, 6, 7, 7), tmp_path / f"net{suffix}")


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor, mask: Any = None, *, scale: Any = None, flag: bool = True) -> Any:
        y = self.one(x) + (0 if mask is None else self.other(mask))
        return {"sum": y if scale is None else y * scale, "nothing": None, "pair": [y + 1, y - 1]}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"mask": torch.randn(2, 4)},
        {"scale": torch.tensor(2.0), "mask": torch.randn(2, 4), "flag": False},  # not in the order of the signature
    ],
)
def test_keyword_arguments_and_nested_outputs(suffix: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    net = Several()
    assert sr.export(net, torch.randn(2, 4), tmp_path / f"net{suffix}", kwargs).batches == (2, 1, 3)
    if suffix == ".onnx":
        file = onnx.load(tmp_path / "net.onnx")
        assert [value.name for value in file.graph.input] == ["x", *(name for name in kwargs if name != "flag")]
        assert file.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_tensor_given_twice_is_two_inputs(suffix: str, tmp_path: Path) -> None:
    net, x = Net(lambda s, a, b: s.one(a) - s.two(b), one=nn.Linear(4, 3), two=nn.Linear(4, 3)), torch.randn(2, 4)
    sr.export(net, (x, x), tmp_path / f"net{suffix}")
    a, b = torch.randn(2, 5, 4)
    torch.testing.assert_close(elsewhere.run(tmp_path / f"net{suffix}", [a, b])[0], net(a, b).detach())


def test_a_batch_of_1_and_the_names_of_outputs(tmp_path: Path) -> None:
    net = Net(lambda s, x: {"logits": s.a(x), "loss": s.a(x).mean()}, a=nn.Linear(4, 3))
    assert sr.export(net, torch.randn(1, 4), tmp_path / "net.onnx").batches == (1, 3)
    assert [value.name for value in onnx.load(tmp_path / "net.onnx").graph.output] == ["logits", "loss"]


def test_the_model_is_left_as_it_is_and_masks_become_zeros(tmp_path: Path) -> None:
    net = noisy(stored.fc()).train()
    prune.random_unstructured(net[0], "weight", 0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    sr.export(net, torch.randn(2, 4), tmp_path / "net.pt2")
    assert net.training and not net._forward_hooks and len(net[0]._forward_pre_hooks) == 1
    assert torch.backends.mha.get_fastpath_enabled()
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    program = torch.export.load(tmp_path / "net.pt2")
    assert "0.weight" in program.state_dict and "0.weight_mask" not in program.state_dict
    assert torch.equal(program.state_dict["0.weight"], net[0].weight_orig * net[0].weight_mask)
    x = torch.randn(5, 4)
    torch.testing.assert_close(program.module()(x), net.eval()(x))


def test_half_precision(tmp_path: Path) -> None:
    net = noisy(stored.fc()).half()
    for suffix in SUFFIXES:
        sr.export(net, torch.randn(2, 4).half(), tmp_path / f"net{suffix}")


# --- errors ----------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 4).exp()


class Branches(nn.Module):
    """Whose function is another one for large batches."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] < 3 else x


class OnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Fixed(), "the model does not take a batch of 1: RuntimeError"),
        (Branches(), "the code of the model fixes the size of the batch"),
    ],
)
def test_a_batch_that_is_fixed_is_said_and_can_be_asked_for(
    model: nn.Module, what: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"net{suffix}"
    with pytest.raises(sr.ExportError, match=what) as error:
        sr.export(model, torch.randn(2, 4), path)
    assert "dynamic_batch=False" in error.value.remedy and not [*tmp_path.iterdir()]
    assert sr.export(model, torch.randn(2, 4), path, dynamic_batch=False).batches == (2,)
    assert [*tmp_path.iterdir()] == [path]


def test_models_and_examples_that_do_not_work(tmp_path: Path) -> None:
    with pytest.raises(sr.ExportError, match=r"torch\.export cannot trace this model"):
        sr.export(OnData(), torch.randn(2, 4), tmp_path / "net.pt2")
    with pytest.raises(sr.ExportError, match="does not run on the example inputs: RuntimeError: mat1 and mat2"):
        sr.export(stored.fc(), torch.randn(2, 5), tmp_path / "net.pt2")
    with pytest.raises(sr.InputError, match="stands for several calls"):
        sr.export(stored.fc(), [torch.randn(2, 4)], tmp_path / "net.pt2")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["net", "net.pt", "net.onnx.gz", ".onnx"])
def test_other_suffixes(name: str, tmp_path: Path) -> None:
    with pytest.raises(sr.InputError, match=r"says nothing about the format(.|\n)*\.onnx or \.pt2"):
        sr.export(stored.fc(), torch.randn(2, 4), tmp_path / name)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(sr.InputError, match="there is no folder"):
        sr.export(stored.fc(), torch.randn(2, 4), tmp_path / "none" / "net.pt2")


@pytest.mark.parametrize("absent", ["onnx", "onnxscript"])
def test_without_the_exporter(absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, absent)
    with pytest.raises(sr.InputError, match=rf"{absent} is not installed(.|\n)*squeeze-release\[export\]"):
        sr.export(stored.fc(), torch.randn(2, 4), tmp_path / "net.onnx")
    sr.export(stored.fc(), torch.randn(2, 4), tmp_path / "net.pt2")


def test_without_onnxruntime_the_file_is_not_compared_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "onnxruntime")
    with pytest.warns(UserWarning, match="net.onnx was not compared"):
        done = sr.export(stored.fc(), torch.randn(2, 4), tmp_path / "net.onnx")
    assert done.max_error is None and done.path.exists()


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_computes_something_else_does_not_stay(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, net = tmp_path / f"net{suffix}", noisy(stored.fc())
    path.write_bytes(b"the old file")
    module = sys.modules[export_function.__module__]
    program = module._program

    def wrong(network: nn.Module, *more: Any) -> Any:
        other = noisy(stored.fc()).eval()
        other.load_state_dict(network.state_dict())
        with torch.no_grad():
            other[4].bias[1] += 1e-3 * float(network(torch.ones(1, 4)).abs().max())
        return program(other, *more)

    monkeypatch.setattr(module, "_program", wrong)
    with pytest.raises(sr.ExportError, match=r"differs from the network by \d\.\de-0\d, allowed are 1.0e-05"):
        sr.export(net, torch.randn(2, 4), path)
    assert path.read_bytes() == b"the old file" and [*tmp_path.iterdir()] == [path]
    sr.export(net, torch.randn(2, 4), path, tolerance=0.1)
    assert path.read_bytes() != b"the old file"


def test_weights_too_large_for_one_file_go_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[export_function.__module__], "_LARGEST_ONNX", 1000)
    net, x = noisy(nn.Linear(64, 64)).eval(), torch.randn(2, 64)  # tiny tensors stay in the file anyway
    sr.export(net, x, tmp_path / "net.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    torch.testing.assert_close(elsewhere.run(tmp_path / "net.onnx", [x])[0], net(x).detach())
