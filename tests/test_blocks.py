"""Whole modules that became a shift, a constant or nothing."""

from __future__ import annotations

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand, reasons
from torch import Tensor, nn

from squeeze_release.modules import Constant, Passthrough, Shift


class Block(nn.Module):
    """A residual MLP that returns what its kind says."""

    def __init__(self, width: int = 6, kind: str = "tensor") -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(width, 8), nn.Linear(8, width), kind

    def forward(self, x: Tensor, *more: Tensor):
        y = x + self.b(torch.relu(self.a(x)))
        return {"tensor": y, "pair": (y, None), "triple": (y, None, None), "list": [y]}[self.kind]


def network(*blocks: nn.Module, first: int = 0) -> Net:
    def run(s, x):
        x = s.stem(x)
        for block in s.blocks:
            x = block(x)
            x = x if isinstance(x, Tensor) else x[0]
        return s.head(x)

    return noisy(Net(run, stem=nn.Linear(4, 6), blocks=nn.ModuleList(blocks), head=nn.Linear(6, 3)))  # type: ignore[return-value]


@torch.no_grad()
def kill(block: Block, bias: float | None = None) -> None:
    block.b.weight.zero_()
    if bias is not None:
        block.b.bias.fill_(bias)


# -------------------------------------------------------------------------------------------- shift, constant, nothing


@pytest.mark.parametrize("kind, outputs", [("tensor", 0), ("pair", 2), ("triple", 3)])
def test_dead_residual_block_becomes_a_shift(kind, outputs):
    net = network(Block(kind=kind), Block(kind=kind))
    kill(net.blocks[0])
    check(
        net,
        rand(2, 4),
        golden={
            "blocks.0": Shift,
            "blocks.0.bias": (6,),
            "blocks.0.outputs": outputs,
            "blocks.1": Block,
            "blocks.1.a.out_features": 8,
        },
    )


def test_dead_residual_block_that_returns_a_list_is_exact():
    net = network(Block(kind="list"))
    kill(net.blocks[0])
    check(net, rand(2, 4))


def test_dead_residual_block_that_adds_nothing_goes():
    net = network(Block(), Block())
    kill(net.blocks[1], bias=0.0)
    check(net, rand(2, 4), golden={"blocks.0": Block, "blocks.1": Passthrough})


def test_block_with_one_living_row_stays():
    net = network(Block())
    kill(net.blocks[0])
    with torch.no_grad():
        net.blocks[0].b.weight[2, 3] = 1e-3
    check(net, rand(2, 4), golden={"blocks.0": Block, "blocks.0.a.out_features": 1, "blocks.0.b.weight": (6, 1)})


def test_shift_is_as_narrow_as_the_stream():
    net = network(Block(), Block())
    kill(net.blocks[0])
    dead(net.stem, 1, 4)
    dead(net.blocks[1].b, 1, 4)
    check(
        net,
        rand(2, 4),
        golden={"stem.out_features": 4, "blocks.0": Shift, "blocks.0.bias": (4,), "head.in_features": 4},
    )


def test_block_whose_shift_differs_from_place_to_place_stays():
    class Placed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.position

    net = network(Placed())
    kill(net.blocks[0])
    check(net, rand(2, 5, 4), golden={"blocks.0": Placed})


def test_block_that_subtracts_or_scales_is_exact():
    class Minus(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x - self.b(torch.relu(self.a(x)))

    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x, self.b(torch.relu(self.a(x))), alpha=0.5)

    class Double(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + x + self.b(torch.relu(self.a(x)))

    net = network(Minus(), Half(), Double())
    for block in net.blocks:
        kill(block)
    squeezed = check(net, rand(2, 4))
    assert squeezed.report.params_after <= 30 + 21 + 3 * (6 + 6 + 8 + 8 + 6)


def test_constant_branch_inside_a_sequential():
    net = noisy(
        nn.Sequential(
            nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)
        )
    )
    dead(net[1][2], *range(6))
    squeezed = check(net, rand(2, 4), gradients=False)
    assert squeezed.report.params_after <= 2 + 6  # the network is a constant


def test_constant_branch_of_a_sum_becomes_a_constant():
    branch = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 1))
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.branch(y)),
        stem=nn.Conv2d(3, 6, 1),
        branch=branch,
        head=nn.Conv2d(6, 2, 3, padding=1),
    )
    noisy(net)
    dead(net.branch[2], *range(6))
    check(net, rand(1, 3, 5, 5), golden={"branch": Constant, "branch.channel_dim": 1, "branch.value": (6,)})


def test_branch_that_changes_the_resolution_is_not_a_constant_of_its_input():
    net = Net(
        lambda s, x: s.head(s.down(y := s.stem(x)) + s.branch(y)),
        stem=nn.Conv2d(3, 6, 1),
        down=nn.Conv2d(6, 6, 1, stride=2),
        branch=nn.Conv2d(6, 6, 3, stride=2, padding=1),
        head=nn.Conv2d(6, 2, 1),
    )
    noisy(net)
    dead(net.branch, *range(6))
    squeezed = check(net, rand(1, 3, 6, 6), golden={"branch": nn.Conv2d}, gradients=False)
    assert "branch" in reasons(squeezed.report)


def test_dead_branch_inlined_in_a_larger_forward():
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.b(torch.relu(s.a(s.norm(y))))),
        stem=nn.Linear(4, 6),
        norm=nn.LayerNorm(6),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 6),
        head=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.b, *range(6))
    squeezed = check(net, rand(2, 4))
    assert (
        squeezed.report.params_after <= 30 + 14 + 12 + 6 + 8 + 1 + 6 + 6
    )  # at most one channel left inside, and the shift
    assert "0" not in {str(p.numel()) for p in squeezed.model.parameters()}


def test_block_called_with_the_stream_as_second_argument():
    """Both arguments have the same shape: the stand-in must hand on the right one."""

    class Second(Block):
        def forward(self, other: Tensor, x: Tensor) -> Tensor:
            return x + self.b(torch.relu(self.a(x)))

    net = Net(
        lambda s, x: s.head(s.block(s.cond(x), s.stem(x))),
        stem=nn.Linear(4, 6),
        cond=nn.Linear(4, 6),
        block=Second(),
        head=nn.Linear(6, 2),
    )
    noisy(net)
    kill(net.block)
    check(net, rand(2, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda b, x, c: b(x, c),
        lambda b, x, c: b(x=x, cond=c),
        lambda b, x, c: b(cond=c, x=x),
        lambda b, x, c: b(x, cond=c),
    ],
)
def test_block_called_with_keywords(call):
    class Conditioned(Block):
        def forward(self, x: Tensor, cond: Tensor) -> Tensor:
            return x + self.b(torch.relu(self.a(x) * cond[..., :1]))

    net = Net(
        lambda s, x: s.head(call(s.block, s.stem(x), s.cond(x))),
        stem=nn.Linear(4, 6),
        cond=nn.Linear(4, 6),
        block=Conditioned(),
        head=nn.Linear(6, 2),
    )
    noisy(net)
    kill(net.block)
    check(net, rand(2, 4), gradients=False)  # what feeds a layer of zeros is no longer computed


def test_attributes_of_a_dead_block_read_elsewhere():
    def run(s, x):
        x = s.stem(x.to(s.block.b.weight.dtype))
        return s.head(s.block(x) * s.block.gain)

    net = Net(run, stem=nn.Linear(4, 6), block=Block(), head=nn.Linear(6, 2))
    net.block.gain = 1.5
    noisy(net)
    kill(net.block)
    dead(net.stem, 1)
    check(net, rand(2, 4))


def test_dead_block_called_twice():
    net = network(Block())
    net.blocks.append(net.blocks[0])
    kill(net.blocks[0])
    check(net, rand(2, 4))


def test_dead_block_under_two_names():
    net = network(Block(), Block())
    net.alias = net.blocks[0]
    kill(net.blocks[0])
    squeezed = check(net, rand(2, 4), again=False)
    assert squeezed.model.alias is squeezed.model.blocks[0]


def test_dead_block_with_a_model_output_inside():
    class Leaky(Block):
        def forward(self, x: Tensor):
            hidden = torch.relu(self.a(x))
            return x + self.b(hidden), hidden

    net = Net(
        lambda s, x: (s.head((r := s.block(s.stem(x)))[0]), r[1]),
        stem=nn.Linear(4, 6),
        block=Leaky(),
        head=nn.Linear(6, 2),
    )
    noisy(net)
    kill(net.block)
    check(net, rand(2, 4), golden={"block.a.out_features": 8})


def test_gate_that_closes_a_block_for_good():
    class Gated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gamma * self.b(torch.relu(self.a(x)))

    net = network(Gated(), Block())
    with torch.no_grad():
        net.blocks[0].gamma.zero_()
    check(net, rand(2, 4), golden={"blocks.0": Passthrough})


def test_keep_holds_a_dead_block():
    net = network(Block(), Block())
    kill(net.blocks[0])
    kill(net.blocks[1])
    check(
        net, rand(2, 4), keep=["blocks.0"], golden={"blocks.0": Block, "blocks.0.a.weight": (8, 6), "blocks.1": Shift}
    )


class Gate(nn.Module):
    """Squeeze and excitation: what the pooled channels say scales them all."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(torch.relu(self.fc1(self.pool(x)))))


@pytest.mark.parametrize("living", [False, True])
def test_gate_that_no_longer_looks_at_its_input(living: bool):
    """Nobody reads the pooled channels any more. torch.export leaves the pooling out where it cleans up a graph: where
    something is written in place, as torchvision's classifiers do."""
    layers = {"stem": nn.Conv2d(3, 8, 3), "gate": Gate(), "flat": nn.Flatten(), "drop": nn.Dropout(inplace=True)}
    net = noisy(Net(lambda s, x: s.head(s.drop(s.flat(s.gate(s.stem(x))))), **layers, head=nn.Linear(8 * 16, 2)))
    dead(net.stem, 5)
    dead(net.gate.fc2, *range(int(living), 8))
    kinds = (nn.Conv2d, nn.Conv2d) if living else (Passthrough, Constant)
    golden = {"gate.fc1": kinds[0], "gate.fc2": kinds[1], "stem.out_channels": 7}
    check(net, rand(2, 3, 6, 6), golden=golden)
