"""compaction="index": layers narrower than the stream they read from or write to, the same function all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from check import assert_same, check, close, noisy
from hypothesis import HealthCheck, given, settings
from networks import Case
from networks.strategy import cases
from torch import Tensor, nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release import compaction
from squeeze_release.modules import (
    IndexedLinear,
    PlacedConv1d,
    PlacedConv2d,
    PlacedLinear,
    with_place,
)

F64 = torch.float64


class Residual(nn.Module):
    """Two blocks on a stream: the second reads what the first one and the stem wrote."""

    def __init__(self, width: int = 16, inner: int = 8, bias: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.bn = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, inner, bias, norm) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(inner) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


@torch.no_grad()
def unaligned(net: Residual) -> Residual:
    """The stem writes channels 0 to 7, the first block 4 to 11, the second 8 to 15: together all of them."""
    net.stem.weight[8:] = 0
    net.blocks[0].conv2.weight[:4] = 0
    net.blocks[0].conv2.weight[12:] = 0
    net.blocks[1].conv2.weight[:8] = 0
    return net


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_writers_place_and_readers_gather(bias: bool, norm: bool) -> None:
    net = unaligned(noisy(Residual(bias=bias, norm=norm)))
    plain = check(net, torch.randn(2, 3, 9, 9, dtype=F64))
    assert plain.model.stem.out_channels == 16 and type(plain.model.stem) is nn.Conv2d  # off by default
    golden: dict[str, object] = {
        "stem": PlacedConv2d,
        "stem.weight": (8, 3, 3, 3),
        "stem.place": (16,),
        "blocks.0.conv2.weight": (8, 8, 3, 3),
        "blocks.1.conv2.weight": (8, 8, 3, 3),
        "blocks.0.conv1.bias": (8,) if bias else None,
        "stem.fill": (8,),
        "head.weight": (4, 16),
        "head": nn.Linear,
    }
    # A reader that took a constant in no longer teaches its writer: where constants are not 0, gradients differ there.
    same = not norm and not bias
    small, report = check(net, torch.randn(2, 3, 9, 9, dtype=F64), compaction="index", golden=golden, gradients=same)
    # Eight living channels and one carrier, twelve and one; fewer where no constant survives the ReLU.
    first, second = (small.blocks[i].conv1.weight.size(1) for i in range(2))
    assert first in (8, 9) and second in (12, 13) and report.params_after < plain.report.params_after
    assert isinstance(small.stem.fill, nn.Parameter) == bias
    assert "3 -> 8 of 16" in str(report)


def test_carrier_of_the_readers() -> None:
    """Constants other than 0 in front of zero padding: one is gathered for all, exactly at every resolution."""
    net = unaligned(noisy(Residual()))
    with torch.no_grad():
        net.bn.bias[8:] = torch.linspace(1, 3, 8)
        net.bn.running_mean[8:] = 0
    x = torch.randn(2, 3, 9, 9, dtype=F64)
    small, report = check(net, x, compaction="index", golden={"blocks.0.conv1.weight": (8, 9, 3, 3)}, gradients=False)
    assert report.max_error > 0  # sums were formed in another order: the constants really were carried
    assert 15 in small.blocks[0].conv1.index  # the largest of them
    with torch.no_grad():
        net.bn.bias[8:] = 0
    check(net, x, compaction="index", golden={"blocks.0.conv1.weight": (8, 8, 3, 3)}, gradients=False)
    for size in ((5, 7), (16, 11)):
        assert_same(net, sr.squeeze(net, x, compaction="index").model, (torch.randn(1, 3, *size, dtype=F64),), {})


class Stream(nn.Module):
    """A stream of Linear layers whose last writer and reader are looked at from outside: nothing can shrink."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12, bias), nn.Linear(12, 12, bias), nn.Linear(12, 12, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.c((x + self.b(x)).relu())


def test_constants_fold_in_front_of_a_linear() -> None:
    net = Stream(bias=False)
    with torch.no_grad():
        net.a.weight[4:] = 0
        net.b.weight[:, :2] = 0
        net.c.weight[3:9] = 0
    x = torch.randn(3, 6, dtype=F64)
    # b reads channels 2 and 3 only: 0 and 1 it does not read, the others are 0 there.
    check(net, x, compaction="index", golden={"a": PlacedLinear, "b.weight": (12, 2), "b.index": (2,), "b.bias": None})
    net = Stream()
    with torch.no_grad():
        net.a.weight[4:] = 0
        net.c.weight[3:9] = 0
    golden: dict[str, object] = {"a.weight": (4, 6), "a.fill": (8,), "b.weight": (12, 4), "c.weight": (6, 12)}
    check(net, x, compaction="index", golden=golden, gradients=False)


@pytest.mark.parametrize("dtype, pays", [(torch.float32, False), (F64, True)])
def test_what_pays_is_counted(dtype: torch.dtype, pays: bool) -> None:
    """An index is 8 bytes, so in float32 it has to save two numbers."""
    net = Stream(bias=False).to(dtype)
    with torch.no_grad():
        net.a.weight[4:7] = 0  # 18 numbers; 12 indices and 3 zeros
        net.b.weight[:, 4:7] = 1.0  # nothing to read there
        net.c.weight[:, 3] = 0  # 12 numbers; 11 indices
    small, report = sr.squeeze(net, torch.randn(3, 6, dtype=dtype), compaction="index")
    assert type(small.a) is (PlacedLinear if pays else nn.Linear)
    assert type(small.c) is (IndexedLinear if pays else nn.Linear)
    assert report.params_after <= report.params_before


@pytest.mark.parametrize("change", ["sums to zero", "tied", "keep", "looked at", "grouped"])
def test_twins_that_stay(change: str) -> None:
    """Each looks compactable and is not."""
    net, keep = Stream(), []
    with torch.no_grad():
        net.a.weight[4:] = 0
        net.c.weight[3:9] = 0
        if change == "sums to zero":
            net.c.weight[3:9, 0], net.c.weight[3:9, 1] = 0.5, -0.5
    if change == "tied":
        net.b.weight = net.c.weight
    if change == "keep":
        keep = ["c"]
    if change == "looked at":
        net.register_forward_hook(lambda module, args, output: output + module.c.weight.sum())
    if change == "grouped":
        net.c = nn.Sequential(nn.Unflatten(1, (12, 1)), nn.Conv1d(12, 12, 1, groups=2), nn.Flatten())
        with torch.no_grad():
            net.c[1].weight[3:9] = 0
    small, _ = check(net, torch.randn(3, 6, dtype=F64), compaction="index", keep=keep, gradients=False)
    assert isinstance(small.a, PlacedLinear)
    assert not any(isinstance(module, (PlacedLinear, PlacedConv1d)) for module in small.c.modules())


def test_a_module_called_twice() -> None:
    """Once with constants, once without: only what is the same in both calls folds."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.b(y)

    net = Twice()
    with torch.no_grad():
        net.a.weight[4:] = 0
        net.b.weight[:, 8:] = 0
        net.b.weight[6:] = 0
    args = (torch.randn(3, 6, dtype=F64), torch.randn(3, 12, dtype=F64))
    check(net, args, compaction="index", golden={"b": PlacedLinear, "b.weight": (6, 8)})


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_that_is_one_layer(inplace: bool) -> None:
    layer, x = nn.Linear(6, 12).double(), torch.randn(6, dtype=F64)
    with torch.no_grad():
        layer.weight[::2] = 0
        layer.weight[:, 4:] = 0
    want = layer(x).detach()
    small, report = sr.squeeze(layer, x, compaction="index", inplace=inplace)
    assert type(small) is PlacedLinear and (small is layer) == inplace and report.params_after == 6 * 4 + 12
    close(small(x).detach(), want)


def test_a_layer_with_two_names_and_a_hook() -> None:
    net, seen = Stream(), []
    net.again = net.c
    net.c.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    with torch.no_grad():
        net.c.weight[3:9] = 0
    small, _ = check(net, torch.randn(3, 6, dtype=F64), compaction="index")
    assert type(small.c) is PlacedLinear and small.again is small.c and set(seen[:2]) == {(3, 12)}


def test_layers_that_are_constant_altogether() -> None:
    """No width is ever 0."""
    net = Stream()
    with torch.no_grad():
        net.a.weight.zero_()
        net.b.weight[:3] = 0
    small, _ = check(net, torch.randn(3, 6, dtype=F64), compaction="index", keep=["a"], gradients=False)
    assert all(min(p.shape) > 0 for p in small.parameters())
    check(net, torch.randn(3, 6, dtype=F64), compaction="index", gradients=False)


def test_the_fast_path_of_a_transformer_is_left() -> None:
    """It reads the weights of its Linear layers without calling them, and only under no_grad."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with torch.no_grad():
        for layer in net.layers:
            layer.linear2.weight[:10] = 0
    small, _ = check(net.eval(), torch.randn(2, 5, 16, dtype=F64), compaction="index")
    assert isinstance(small.layers[0].linear2, PlacedLinear)


def test_squeezing_again_composes() -> None:
    """A compacted net that is pruned further: with and without compaction the second squeeze is exact."""
    net = unaligned(noisy(Residual(bias=True)))
    x = torch.randn(2, 3, 9, 9, dtype=F64)
    small = check(net, x, compaction="index", gradients=False).model
    with torch.no_grad():
        small.stem.weight[:3] = 0
        small.blocks[0].conv2.weight[2:5] = 0
        small.blocks[1].conv1.weight[:, 4] = 0
        small.blocks[0].conv1.weight[0] = 0
    golden: dict[str, object] = {
        "stem.weight": (5, 3, 3, 3),
        "stem.place": (13,),
        "blocks.0.conv2.weight": (5, 8, 3, 3),
    }
    check(small, x, compaction="index", golden=golden | {"stem.fill": (8,)}, gradients=False)
    check(small, x)


def test_constants_that_an_earlier_step_folded_are_not_rounded() -> None:
    """The second convolution folds constants in the first step; in the next, the third one carries what came out."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            return x + self.c(x)

    net = Chain()
    with torch.no_grad():
        net.a.weight[4:] = 0
        net.b.weight[4:, :4] = 0
    small, report = sr.squeeze(net, torch.randn(1, 3, 7, 7), compaction="index")  # float32
    assert small.a.out_channels == 4 and small.c.in_channels == 5
    assert report.max_error is not None and report.max_error < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_dtypes_and_memory_formats(dtype: torch.dtype, channels_last: bool) -> None:
    net = unaligned(noisy(Residual(bias=True))).eval()
    net, x = net.to(dtype), torch.randn(2, 3, 9, 9, dtype=dtype)
    if channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    small, report = sr.squeeze(net, x, compaction="index")
    assert report.max_error is not None and report.max_error < 1e-10
    assert {p.dtype for p in small.parameters()} == {dtype} and small.stem.fill.dtype == dtype
    assert small.stem.weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    with torch.no_grad():
        close(small.eval()(x).double(), net(x).double(), {torch.float32: 1e-5}.get(dtype, 3e-2))


def test_masks_are_fine_too() -> None:
    net = noisy(Residual())
    for conv in (net.stem, net.blocks[0].conv2, net.blocks[1].conv2):
        prune.random_structured(conv, "weight", 0.5, dim=0)
    union = sum(conv.weight_mask.flatten(1).any(1).int() for conv in (net.stem, *[b.conv2 for b in net.blocks]))
    small = sr.squeeze(net, torch.randn(1, 3, 9, 9), compaction="index").model
    assert small.stem.out_channels == 8 and len(small.stem.place) in (int((union > 0).sum()) + i for i in (0, 1))


def test_it_trains_saves_exports_and_compiles() -> None:
    torch.manual_seed(0)
    net = unaligned(noisy(Residual(bias=True))).train()
    x = torch.randn(4, 3, 9, 9)
    small = sr.squeeze(net, x, compaction="index").model
    assert small.training
    before = copy.deepcopy(small.state_dict())
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    small(x).square().sum().backward()
    assert small.stem.fill.grad is not None and small.blocks[1].conv2.weight.grad.abs().sum() > 0
    optimizer.step()
    assert not torch.equal(small.stem.weight, before["stem.weight"])
    other = copy.deepcopy(small)
    other.load_state_dict(before)
    small.eval(), other.eval()
    assert float((other(x) - small(x)).detach().abs().max()) > 1e-4
    other.load_state_dict(small.state_dict())
    close(other(x), small(x), 0.0)
    program = torch.export.export(small, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    close(program.module()(x[:3]), small(x[:3]), 1e-5)
    assert not any("squeeze_release" in str(node.target) for node in program.graph.nodes)


@pytest.mark.slow
def test_it_compiles() -> None:
    net = unaligned(noisy(Residual(bias=True))).eval()
    x = torch.randn(4, 3, 9, 9)
    small = sr.squeeze(net, x, compaction="index").model.eval()
    close(torch.compile(small, fullgraph=True)(x), small(x), 1e-5)


def test_autocast() -> None:
    net = unaligned(noisy(Residual(bias=True))).eval()
    x = torch.randn(4, 3, 9, 9)
    small = sr.squeeze(net, x, compaction="index").model
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        close(small(x).double(), net(x).double(), 3e-2)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_networks(case: Case) -> None:
    """Indices cost nothing here, so that small networks are compacted too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_INDEX_BYTES", 0)
        small, report = sr.squeeze(case.model, case.inputs, compaction="index")
        for call in case.calls:
            assert_same(case.model, small, call, {})
        again = sr.squeeze(small, case.inputs, compaction="index")
    assert again.report.params_after == report.params_after <= sr.squeeze(case.model, case.inputs).report.params_after
    dense = sr.squeeze(small, case.inputs).model
    for call in case.calls:
        assert_same(case.model, dense, call, {})


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="has 2 rows and 1 constants, but places 4"):
        PlacedLinear(3, 2, place=torch.tensor([0, 3]), fill=torch.zeros(1))
    with pytest.raises(TypeError, match="runs code of its own"):
        with_place(nn.ConvTranspose2d(2, 2, 1), torch.arange(1))
    with pytest.raises(sr.InputError, match="is not a known value"):
        sr.squeeze(nn.Linear(2, 2), torch.randn(1, 2), compaction="scatter")
