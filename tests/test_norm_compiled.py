"""CompensatedLayerNorm as a compiler sees it: the same numbers, and no more passes over memory than a LayerNorm."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from check import close
from test_fused import DEVICE, near
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch.func import functional_call

from squeeze_release import CompensatedLayerNorm, modules
from squeeze_release.modules import formulas

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32")  # inductor's own
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FORMULAS = pytest.mark.parametrize("formula", ["_on_a_gpu", "_of_many_rows", "_of_few_rows"])


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def norm(kept: int, removed: int, dtype: torch.dtype = torch.float32, offset: float = 2, **how: Any) -> Any:
    made = CompensatedLayerNorm(kept, dtype=dtype, **how)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    made.merge(torch.randn(removed, dtype=torch.float64) + offset)
    return made


@pytest.fixture
def _formula(formula: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the one that is chosen where nothing is compiled."""
    monkeypatch.setattr(formulas, "_of_few_rows", getattr(formulas, formula))


@BOTH
@FORMULAS
@pytest.mark.parametrize("width", [1, 3, 100, 1000])
@pytest.mark.parametrize("removed", [0, 5])
@pytest.mark.usefixtures("_formula")
def test_the_formula(width: int, removed: int, dtype: torch.dtype) -> None:
    made, x = norm(width, removed, dtype), (2 * torch.randn(7, width) + 1).to(dtype)
    if width == 1 and not removed:
        x = x * 0 + 1  # of one channel alone there is nothing left but the bias
    near(made._written_out(x), copy.deepcopy(made).double()(x.double()))


@FORMULAS
@pytest.mark.parametrize("mean, offset", [(1e4, 1e4), (-300.0, 0.0), (0.0, 1e4)])
@pytest.mark.parametrize("removed", [1, 50])
@pytest.mark.usefixtures("_formula")
def test_large_means_do_not_cancel(removed: int, mean: float, offset: float) -> None:
    made, x = norm(200, removed, offset=offset), mean + torch.randn(30, 200)
    spread = max(1.0, abs(mean - offset) * (removed * 200) ** 0.5 / (removed + 200))
    near(made._written_out(x), copy.deepcopy(made).double()(x.double()), 4e-7 * (1 + max(abs(mean), offset) / spread))


class Block(nn.Module):
    """What stands before a norm in a ConvNeXt, and behind."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.behind = norm, nn.Linear(48, 8)
        self.bias, self.scale = (nn.Parameter(torch.randn(48)) for _ in range(2))

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        y: Tensor = self.behind(self.norm((branch + self.bias) * self.scale + stream))
        return y


class Downsample(nn.Module):
    """The end of a stage of a ConvNeXt, and the beginning of the next."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.branch, self.norm, self.behind = nn.Linear(192, 48), norm, nn.Conv2d(48, 96, 2, 2)
        self.scale = nn.Parameter(torch.randn(48, 1, 1))

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        y: Tensor = self.behind(self.norm(self.branch(branch).permute(0, 3, 1, 2) * self.scale + stream))
        return y


class LayerNorm2d(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.fixture
def _thresholds_of_a_gpu() -> Iterator[None]:
    """What more operations or reads are is written to memory; on a CPU there may be more of both."""
    with inductor.patch(realize_opcount_threshold=30, realize_acc_reads_threshold=8):
        yield


def in_a_block(norm: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    return Block(norm), [torch.randn(64, 48) for _ in range(2)]


def before_a_stage(norm: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    return Downsample(norm), [torch.randn(2, 14, 14, 192), torch.randn(2, 48, 14, 14)]


@BOTH
@pytest.mark.parametrize(
    "where, plain, channel_dim", [(in_a_block, nn.LayerNorm, -1), (before_a_stage, LayerNorm2d, 1)]
)
@pytest.mark.usefixtures("_thresholds_of_a_gpu")
@torch.no_grad()
def test_no_more_kernels_than_a_layer_norm(where: Any, plain: Any, channel_dim: int, dtype: torch.dtype) -> None:
    kernels = []
    for made in (norm(48, 20, channel_dim=channel_dim), plain(48)):
        network, inputs = where(made)
        network, inputs = network.to(DEVICE, dtype), [each.to(DEVICE, dtype) for each in inputs]
        metrics.reset()
        y = torch.compile(network, fullgraph=True)(*inputs)
        kernels.append(metrics.generated_kernel_count)
        torch.testing.assert_close(y, network(*inputs), rtol=1e-4 if dtype == torch.float32 else 0.05, atol=5e-2)
    assert kernels[0] <= kernels[1]


@BOTH
@FORMULAS
@pytest.mark.usefixtures("_formula")
@torch.no_grad()
def test_each_formula_as_a_kernel(dtype: torch.dtype) -> None:
    made, x = norm(48, 20, dtype, channel_dim=1), torch.randn(2, 48, 5, 7).to(dtype)
    near(torch.compile(made, fullgraph=True)(x), copy.deepcopy(made).double()(x.double()))


class Seen(list[str]):
    """A compiler that makes nothing, and keeps what it was given."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph.forward


def test_of_many_rows_what_is_known_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "FEW", 60)
    made, few, many = norm(6, 3), torch.randn(10, 6), torch.randn(11, 6)

    def in_memory(x: Tensor, **how: Any) -> bool:
        seen = Seen()
        torch._dynamo.reset()
        near(torch.compile(made, fullgraph=True, backend=seen, **how)(x), copy.deepcopy(made).double()(x.double()))
        return "as_strided" in seen[0]

    with torch.no_grad():
        assert in_memory(many) and not in_memory(few)
        assert in_memory(few, dynamic=True)
    assert not in_memory(many)  # autograd keeps what it needs


@torch.no_grad()
def test_sizes_that_are_left_open_ask_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "FEW", 60)
    made, seen = norm(6, 3), Seen()
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=seen)
    for rows in (3, 10, 11, 400):
        x = torch.randn(rows, 6)
        near(compiled(x), copy.deepcopy(made).double()(x.double()))
    assert len(seen) == 1


@torch.no_grad()
def test_what_is_exported_has_no_views_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "FEW", 0)
    program = torch.export.export(norm(6, 3).to(DEVICE), (torch.randn(5, 6, device=DEVICE),), strict=False)
    assert "as_strided" not in program.graph_module.code


def test_it_is_compiled_as_such_and_not_as_for_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = norm(6, 3), torch.randn(5, 6)
    want = copy.deepcopy(made).double()(x.double())
    monkeypatch.setattr(CompensatedLayerNorm, "_normalize", None)  # that of eager
    near(torch.compile(made, fullgraph=True, backend="aot_eager")(x), want)


def test_numbers_that_change_are_compiled_again() -> None:
    made, x = norm(6, 3), torch.randn(5, 6)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for change in (lambda: None, lambda: made.merge(torch.randn(4)), lambda: setattr(made, "eps", 0.5)):
        change()
        near(compiled(x), copy.deepcopy(made).double()(x.double()))


def test_of_no_channels_nothing_is_left() -> None:
    made = norm(0, 5)
    assert torch.compile(made, fullgraph=True, backend="aot_eager")(torch.randn(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("inside", [False, True])
@torch.no_grad()
def test_buffers_that_are_exchanged(inside: bool) -> None:
    made, other, x = norm(6, 3), norm(6, 5, offset=9), torch.randn(5, 6)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    near(compiled(x), copy.deepcopy(made).double()(x.double()))
    state = dict(other.named_parameters()) | dict(other.named_buffers())
    want = copy.deepcopy(other).double()(x.double())
    if inside:
        call = torch.compile(lambda state, x: functional_call(made, state, (x,)), backend="aot_eager")
        near(call(state, x), want)
    else:
        near(functional_call(compiled, {f"_orig_mod.{name}": each for name, each in state.items()}, (x,)), want)
    near(compiled(x), copy.deepcopy(made).double()(x.double()))


@torch.no_grad()
def test_an_ensemble() -> None:
    both, x = [norm(6, 3), norm(6, 5, offset=9)], torch.randn(5, 6)
    parameters, buffers = torch.func.stack_module_state(both)
    call = torch.vmap(lambda p, b: functional_call(both[0], (p, b), (x,)))
    y = torch.compile(call, backend="aot_eager")(parameters, buffers)
    near(y, torch.stack([copy.deepcopy(each).double()(x.double()) for each in both]))


def test_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    blocks, x = nn.ModuleList([Block(norm(48, removed)) for removed in range(12)]), torch.randn(5, 48)
    counters.clear()
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(block(x, x), copy.deepcopy(block).forward(x, x))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "StdNorm", "RMSNorm"])
@torch.no_grad()
def test_exported_it_takes_other_statistics(name: str, strict: bool) -> None:
    one, other = (getattr(modules, f"Compensated{name}")(6, dtype=torch.float64) for _ in range(2))
    one.merge(torch.randn(3)), other.merge(torch.randn(5) + 9)
    x, state = torch.randn(5, 6, dtype=torch.float64), dict(other.named_buffers())
    program = torch.export.export(one, (x,), strict=strict).module()
    close(program(x), one(x))
    program.load_state_dict(other.state_dict())
    close(program(x), other(x))

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = one

        def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(self.norm, state, (x,))
            return result

    close(torch.export.export(Given(), (x, state), strict=strict).module()(x, state), other(x))


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "StdNorm", "RMSNorm"])
@torch.no_grad()
def test_all_norms_follow_a_merge(name: str) -> None:
    made, x = getattr(modules, f"Compensated{name}")(6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    counters.clear()
    for _ in range(12):
        close(compiled(x), made(x))
        made.merge(torch.randn(2) + 3)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm"])
@pytest.mark.parametrize("few", [formulas.FEW, 0])
@torch.no_grad()
def test_large_numbers_do_not_overflow(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "FEW", few)
    made, x = getattr(modules, f"Compensated{name}")(4096), 1e18 * torch.randn(3, 4096)
    made.merge(1e18 * torch.randn(9))
    near(torch.compile(made, backend="aot_eager")(x), copy.deepcopy(made).double()(x.double()))


def test_integers_are_not_cut_off() -> None:
    made, x = norm(6, 3), torch.randint(0, 9, (5, 6))
    torch.testing.assert_close(torch.compile(made, backend="aot_eager")(x), made(x))


def test_gradients() -> None:
    made, x = norm(6, 3), torch.randn(5, 6, requires_grad=True)
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    got = torch.autograd.grad(torch.compile(made, backend="aot_eager")(x).sin().sum(), (x, *made.parameters()))
    want = torch.autograd.grad(exact(wide).sin().sum(), (wide, *exact.parameters()))
    for one, other in zip(got, want, strict=True):
        near(one, other, 2e-6)


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 4, 3)])
def test_channels_first(shape: tuple[int, ...]) -> None:
    made, x = norm(6, 3, channel_dim=1), torch.randn(shape)
    y = torch.compile(made, fullgraph=True, backend="aot_eager")(x)
    assert y.stride() == made(x).stride()
    near(y, copy.deepcopy(made).double()(x.double()))
