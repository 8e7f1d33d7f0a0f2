"""The stand-ins against what they stand in for: float64 at 1e-12 wherever the claim is exactness."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from check import close
from torch import Tensor, nn
from torch.nn.utils import parametrize

from squeeze_release import modules
from squeeze_release.modules import CompensatedLayerNorm, with_index

F64 = torch.float64


def norms(kept: int, constants: Tensor, eps: float = 1e-5, **how: bool) -> tuple[nn.LayerNorm, CompensatedLayerNorm]:
    """A full-width LayerNorm in float64, and its stand-in on the first `kept` channels."""
    full = nn.LayerNorm(kept + len(constants), eps, **how, dtype=F64)
    for parameter in full.parameters():
        nn.init.normal_(parameter)
    small = CompensatedLayerNorm(kept, eps, **how, dtype=F64)
    small.load_state_dict({name: p[:kept] for name, p in full.state_dict().items()}, strict=False)
    small.merge(constants)
    return full, small


def full_width(full: nn.LayerNorm, x: Tensor, constants: Tensor) -> Tensor:
    wide = torch.cat([x, constants.to(x).expand(*x.shape[:-1], -1)], -1)
    return full(wide)[..., : x.shape[-1]]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", [{}, {"bias": False}, {"elementwise_affine": False}])
@pytest.mark.parametrize("kept, removed, eps", [(5, 3, 1e-5), (1, 4, 0.0), (7, 1, 1e-5), (6, 0, 0.1), (3, 200, 1e-5)])
def test_norm_equals_full_width(kept: int, removed: int, eps: float, how: dict[str, bool], grad: bool) -> None:
    constants = torch.randn(removed, dtype=F64) + 2
    full, small = norms(kept, constants, eps, **how)
    x = torch.randn(4, 3, kept, dtype=F64)
    before = x.clone()
    with torch.set_grad_enabled(grad):
        close(small(x), full_width(full, x, constants))
    assert torch.equal(x, before) and small.removed == removed and small.normalized_shape == (kept,)


@pytest.mark.parametrize(
    "x",
    [
        torch.full((2, 6), 3.0, dtype=F64) + 1e-9 * torch.arange(12, dtype=F64).view(2, 6),  # kept nearly equal
        torch.full((2, 6), 1e4, dtype=F64) + torch.arange(12, dtype=F64).view(2, 6),  # kept far from removed
        1e-6 * torch.arange(12, dtype=F64).view(2, 6),  # variance far below eps
    ],
)
@pytest.mark.parametrize("constants", [[3.0, 3.0], [0.0, 0.0], [1e-6]])
def test_norm_at_the_edges(x: Tensor, constants: list[float]) -> None:
    full, small = norms(6, torch.tensor(constants, dtype=F64))
    want = full_width(full, x, torch.tensor(constants, dtype=F64))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(small(x), want)


def test_norm_in_float32_is_well_conditioned() -> None:
    constants = 30 + 0.1 * torch.randn(300, dtype=F64)
    full, small = norms(64, constants)
    x = 30 + torch.randn(16, 64)
    want = full_width(full, x.double(), constants)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(copy.deepcopy(small).float()(x).double(), want, 1e-5)
    # The paper's own numbers, in float32, lose m2: this is why m2 is what is stored.
    assert abs(small.Q.float() - small.S.float() ** 2 / 300 - small.m2) > 1e-3 * small.m2


def test_merge_twice_is_merge_once() -> None:
    constants = 50 + torch.randn(40, dtype=F64)
    once, twice = CompensatedLayerNorm(4), CompensatedLayerNorm(4)
    once.merge(constants)
    for part in constants.split([13, 1, 26]):
        twice.merge(part)
    twice.merge(constants[:0])
    close(twice.statistics, once.statistics)
    close(once.S, constants.sum())
    close(once.Q, constants.square().sum())
    assert once.removed == twice.removed == 40


def test_norm_can_be_narrowed_again() -> None:
    constants = torch.randn(6, dtype=F64)
    full, small = nn.LayerNorm(11, 0.5, bias=False, dtype=F64), norms(8, constants[:3], bias=False)[1]
    small.merge(constants[3:])
    x = torch.randn(4, 8, dtype=F64)
    for name, value in (("eps", 0.5), ("weight", nn.Parameter(full.weight[:5].detach()))):
        setattr(small, name, value)
        x = x[:, : small.normalized_shape[0]]
        close(copy.deepcopy(small).float()(x.float()).double(), small(x), 1e-6)  # float32 reads copies of its own
    close(small(x), full_width(full, x, constants))


@pytest.mark.parametrize("channels_last", [False, True])
def test_norm_channels_first(channels_last: bool) -> None:
    constants = torch.randn(3, dtype=F64)
    full, last = norms(5, constants)
    first = CompensatedLayerNorm(5, channel_dim=1, dtype=F64)
    first.load_state_dict(last.state_dict())
    x = torch.randn(2, 5, 4, 3, dtype=F64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    want = full_width(full, x.permute(0, 2, 3, 1), constants).permute(0, 3, 1, 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(first(x), want)
            assert first(x).permute(0, 2, 3, 1).is_contiguous()  # as F.layer_norm leaves it


@pytest.mark.parametrize("to", [(torch.float16,), (torch.bfloat16,), (F64,), ("cpu", torch.float16)])
def test_statistics_never_change_dtype(to: tuple[object, ...]) -> None:
    small = CompensatedLayerNorm(4)
    small.merge(1e5 + 1e4 * torch.randn(30, dtype=F64))  # M2 of 3e9: infinite in half
    before = {name: buffer.clone() for name, buffer in small.named_buffers()}
    for name, buffer in small.to(*to).named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    assert small.weight.dtype == to[-1]


def test_statistics_survive_the_meta_device() -> None:
    _, small = norms(4, torch.randn(3, dtype=F64))
    empty = CompensatedLayerNorm(4, device="meta", dtype=F64).half().double().to_empty(device="cpu")
    assert empty.statistics.dtype == F64
    empty.load_state_dict(small.state_dict())
    x = torch.randn(5, 4, dtype=F64)
    close(empty(x), small(x))
    assigned = CompensatedLayerNorm(4, device="meta")
    assigned.load_state_dict(small.float().state_dict(), assign=True)
    close(assigned(x.float()), small(x.float()), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_rounds_once(dtype: torch.dtype) -> None:
    small = norms(16, 300 + torch.randn(50, dtype=F64))[1].to(dtype)
    x = torch.randn(8, 16).to(dtype)
    exact = copy.deepcopy(small).double()(x.double())
    got = small(x)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_under_autocast_is_like_layer_norm(dtype: torch.dtype) -> None:
    small, plain, x = CompensatedLayerNorm(8), nn.LayerNorm(8), torch.randn(4, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        close(small(x), plain(x), 1e-6 if dtype == torch.float32 else 1e-2)


def test_norm_gradients() -> None:
    constants = torch.randn(3, dtype=F64)
    full, small = norms(5, constants)
    x = torch.randn(2, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: small(x), (x, small.weight, small.bias))
    small(x).sin().sum().backward()
    grads = x.grad, small.weight.grad, small.bias.grad
    x.grad = None
    full_width(full, x, constants).sin().sum().backward()
    for got, want in zip(grads, (x.grad, full.weight.grad[:5], full.bias.grad[:5]), strict=True):
        close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_norm_compiles() -> None:
    constants = torch.randn(3, dtype=F64)
    full, small = norms(5, constants)
    x = torch.randn(4, 5, dtype=F64, requires_grad=True)
    compiled = torch.compile(small, fullgraph=True)
    got = compiled(x)
    close(got, full_width(full, x, constants))
    close(torch.autograd.grad(got.sin().sum(), x)[0], torch.autograd.grad(small(x).sin().sum(), x)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("strict", [False, True])
def test_norm_exports(strict: bool) -> None:
    constants = torch.randn(3, dtype=F64)
    full, small = norms(5, constants)
    example, batch = torch.randn(4, 5, dtype=F64), {"x": {0: torch.export.Dim("batch")}}
    with torch.no_grad():
        program = torch.export.export(small, (example,), dynamic_shapes=batch, strict=strict)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    targets = [str(target) for target in calls if target is not operator.getitem]  # of an op with two outputs
    assert all(t.startswith("aten.") and "_." not in t and "scalar" not in t for t in targets), "no plain ops"
    x = torch.randn(7, 5, dtype=F64)
    close(program.module()(x), full_width(full, x, constants))


def test_norm_copies_and_loads() -> None:
    _, small = norms(5, torch.randn(3, dtype=F64))
    assert set(small.state_dict()) == {"weight", "bias", "statistics"}
    other = CompensatedLayerNorm(5, dtype=F64)
    other.load_state_dict(small.state_dict())
    x = torch.randn(4, 5, dtype=F64)
    want, want32 = small(x), copy.deepcopy(small).float()(x.float())
    for twin in (other, copy.deepcopy(small)):
        assert torch.equal(twin(x), want) and twin.removed == 3
        assert torch.equal(twin.float()(x.float()), want32)
    assert repr(small) == "CompensatedLayerNorm(5, removed=3, eps=1e-05, channel_dim=-1)"


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "StdNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_buffers_that_are_exchanged(name: str, dtype: torch.dtype) -> None:
    """torch.func.functional_call puts tensors in place without asking the module."""
    make = getattr(modules, f"Compensated{name}")
    one, other = make(5, dtype=dtype), make(5, dtype=dtype)
    one.merge(torch.randn(3, dtype=F64))
    other.merge(7 + torch.randn(4, dtype=F64))
    x = torch.randn(4, 5, dtype=dtype)
    close(torch.func.functional_call(one, other.state_dict(), (x,)), other(x), 1e-12 if dtype == F64 else 1e-6)
    assert not torch.allclose(one(x), other(x))


def test_norm_refuses_the_wrong_width() -> None:
    with pytest.raises(RuntimeError, match=r"keeps 5 channels, got an input of shape \(4, 1\)"):
        CompensatedLayerNorm(5)(torch.randn(4, 1))
    with pytest.raises(ValueError, match="channel_dim is -1"):
        CompensatedLayerNorm(5, channel_dim=2)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(3, 4), (2, 6)),
        (nn.Conv1d(3, 4, 3, padding=1), (2, 6, 5)),
        (nn.Conv2d(3, 3, 3, groups=3, padding=1, padding_mode="circular"), (2, 6, 5, 5)),
        (nn.Conv3d(3, 4, 2, bias=False), (2, 6, 3, 3, 3)),
    ],
)
def test_indexed_gathers_then_runs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x, index = torch.randn(shape), torch.tensor([5, 0, 0])
    new = with_index(layer, index)
    assert type(new) is modules.INDEXED[type(layer)] and list(new.state_dict()) == [*layer.state_dict(), "index"]
    assert torch.equal(new(x), layer(x[:, index]))
    assert torch.equal(new(x[0]), layer(x[0][index]))
    twice = with_index(new, torch.tensor([2, 0, 1]))
    assert torch.equal(twice.index, torch.tensor([0, 5, 0]))
    assert torch.equal(new.index, index) and "index" not in layer.state_dict()


def test_indexed_shares_parameters_hooks_and_mode() -> None:
    layer, calls = nn.Linear(2, 2).eval(), []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    new = with_index(layer, torch.tensor([1, 3]))
    assert new.weight is layer.weight and not new.training
    new(torch.randn(2, 4))
    handle.remove()
    new(torch.randn(2, 4))
    assert calls == [1] and new.half().index.dtype == torch.int64


def test_indexed_constructors() -> None:
    linear = modules.IndexedLinear(2, 3, bias=False, index=torch.tensor([4, 1], dtype=torch.int32))
    x = torch.randn(5, 6)
    assert torch.equal(linear(x), x[:, [4, 1]] @ linear.weight.T) and linear.index.dtype == torch.int64
    conv = modules.IndexedConv2d(2, 3, 1, stride=2, index=torch.tensor([1, 1]))
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(conv(x), F.conv2d(x[:, [1, 1]], conv.weight, conv.bias, stride=2))
    with pytest.raises(ValueError, match=r"reads 2 channels, got an index of shape \(3,\)"):
        modules.IndexedLinear(2, 3, index=torch.tensor([0, 1, 2]))


def test_only_plain_layers_can_be_indexed() -> None:
    class Plain(nn.Linear):
        pass

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class OwnConv(nn.Conv2d):
        def _conv_forward(self, *args: Tensor) -> Tensor:
            return 2 * super()._conv_forward(*args)

    parametrized, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched.forward = lambda x: x
    assert modules.can_index(Plain(2, 2)) and modules.can_index(with_index(Plain(2, 2), torch.arange(2)))
    for module in (Own(2, 2), OwnConv(2, 2, 1), parametrized, patched, nn.ConvTranspose2d(2, 2, 1), nn.ReLU()):
        assert not modules.can_index(module)
        with pytest.raises(TypeError, match="runs code of its own"):
            with_index(module, torch.arange(2))


@pytest.mark.parametrize("channel_dim, shape", [(-1, (2, 5, 3)), (1, (2, 3, 5, 4)), (1, (2, 3))])
def test_trivial_blocks(channel_dim: int, shape: tuple[int, ...]) -> None:
    x, values = torch.randn(shape), torch.tensor([2.0, -1.0, 0.5])
    spread = values if channel_dim == -1 else values.view(3, *[1] * (len(shape) - 2))
    assert torch.equal(modules.Shift(values, channel_dim=channel_dim)(x, None, mask=x), x + spread)
    block = modules.Constant(torch.cat([values, values]), channel_dim=channel_dim)
    out = block(hidden=x)
    wide = list(shape)
    wide[channel_dim] = 6
    assert out.shape == tuple(wide) and torch.equal(out.narrow(channel_dim, 3, 3), (x * 0 + spread))
    F.relu(out, inplace=True).sum().backward()  # as a layer's output, it may be written to
    assert modules.Passthrough()(x, values) is x and modules.Passthrough(outputs=2)(hidden=x, mask=values) == (x, None)
    assert block.value[1] == -1 and block.value.grad[1] == 0 and block.value.grad[0] > 0
