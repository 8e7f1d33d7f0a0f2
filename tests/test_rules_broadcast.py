"""Two tensors that meet: residual streams, gates, scales and numbers that come from a width."""

from __future__ import annotations

import math

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

from squeeze_release.modules import Constant

# ------------------------------------------------------------------------------------------- two operands that meet


@pytest.mark.parametrize(
    "meet",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / (b * b + 1),
        lambda a, b: torch.maximum(a, b),
        lambda a, b: torch.where(a > b, a, b),
    ],
)
def test_two_branches_lose_what_both_leave_constant(meet):
    net = Net(
        lambda s, x: s.out(torch.tanh(meet(s.a(x), s.b(x)))), a=nn.Linear(4, 6), b=nn.Linear(4, 6), out=nn.Linear(6, 3)
    )
    noisy(net)
    dead(net.a, 1, 2)
    dead(net.b, 1, 3)  # 2 and 3 are constant in one branch only: they stay
    unread(net.out, 5)
    squeezed = check(net, rand(2, 4), gradients=False)
    exact = 4 if meet(torch.ones(1), torch.zeros(1)).dtype and "where" not in meet.__code__.co_names else 5
    assert squeezed.model.out.in_features == exact


def test_zero_times_anything_is_zero():
    net = Net(
        lambda s, x: s.out(torch.relu(s.gate(x)) * s.lin(x)),
        gate=nn.Linear(4, 6),
        lin=nn.Linear(4, 6),
        out=nn.Linear(6, 3),
    )
    noisy(net)
    dead(net.gate, 2, bias=-1.0)
    dead(net.gate, 3, bias=1.0)
    check(net, rand(2, 4), golden={"gate.out_features": 5, "lin.out_features": 5, "out.in_features": 5})


def stream(blocks: int = 2) -> Net:
    net = Net(
        lambda s, x: s.head(torch.tanh(s.run(x))),
        stem=nn.Linear(4, 6),
        head=nn.Linear(6, 2),
        a=nn.ModuleList(nn.Linear(6, 7) for _ in range(blocks)),
        b=nn.ModuleList(nn.Linear(7, 6) for _ in range(blocks)),
    )
    net.run = Stream(net)
    return noisy(net)  # type: ignore[return-value]


class Stream:
    """A plain attribute, not a module: the residual stream is written out in the forward of the network."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net.stem(x)
        for a, b in zip(self.net.a, self.net.b, strict=True):
            x = x + b(torch.relu(a(x)))
        return x


def test_residual_stream_loses_a_channel_that_every_writer_leaves_constant():
    net = stream()
    for writer in (net.stem, *net.b):
        dead(writer, 1, 3)
    check(
        net,
        rand(2, 4),
        golden={
            "stem.out_features": 4,
            "a.0.in_features": 4,
            "b.0.out_features": 4,
            "b.1.out_features": 4,
            "head.in_features": 4,
            "a.1.out_features": 7,
        },
    )


def test_residual_stream_keeps_a_channel_that_one_writer_writes():
    net = stream()
    for writer in (net.stem, net.b[0]):
        dead(writer, 1)
    check(net, rand(2, 4), golden={"stem.out_features": 6, "head.in_features": 6})


@pytest.mark.parametrize("rules, left", [("A", 6), ("AB", 6), ("paper", 6), ("all", 5)])
def test_residual_stream_is_narrowed_by_rule_set_all_alone(rules, left):
    net = stream()
    for writer in (net.stem, *net.b):
        dead(writer, 1)
    dead(net.a[0], 2)
    check(net, rand(2, 4), rules=rules, golden={"stem.out_features": left, "a.0.out_features": 6})


def test_residual_add_of_the_input_itself_keeps_the_width():
    net = Net(
        lambda s, x: s.head(x + s.b(torch.relu(s.a(x)))), a=nn.Linear(6, 7), b=nn.Linear(7, 6), head=nn.Linear(6, 2)
    )
    noisy(net)
    dead(net.b, 1)
    dead(net.a, 1, 2)
    squeezed = check(net, rand(2, 6), golden={"b.out_features": 6, "a.out_features": 5})
    assert "fixed width" in reasons(squeezed.report)


def test_x_plus_x():
    net = Net(lambda s, x: s.out((y := s.lin(x)) + y), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2))
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"lin.out_features": 5})


# ------------------------------------------------------------------------------------------------------ broadcasting


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 3, 1), nn.Conv2d(3, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


def test_se_gate():
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), Gate(6), nn.Conv2d(6, 2, 1)))
    dead(net[0], 1, 2)
    dead(net[1].up, 1)  # 2 is a constant times a gate that varies: stays
    check(
        net,
        rand(1, 3, 5, 5),
        golden={"0.out_channels": 5, "1.up.out_channels": 5, "1.down.in_channels": 5, "2.in_channels": 5},
    )


def test_se_gate_that_is_closed():
    net = Net(
        lambda s, x: s.out(s.lin(x) * torch.relu(s.gate(x.mean((2, 3), keepdim=True)))),
        lin=nn.Conv2d(3, 6, 1),
        gate=nn.Conv2d(3, 6, 1),
        out=nn.Conv2d(6, 2, 3, padding=1),
    )
    noisy(net)
    dead(net.gate, 4, bias=-1.0)
    check(net, rand(1, 3, 5, 5), golden={"lin.out_channels": 5, "gate.out_channels": 5, "out.in_channels": 5})


def test_spatial_gate():
    net = Net(
        lambda s, x: s.out((y := s.lin(x)) * torch.sigmoid(s.gate(y))),
        lin=nn.Conv2d(3, 6, 1),
        gate=nn.Conv2d(6, 1, 3, padding=1),
        out=nn.Conv2d(6, 2, 1),
    )
    noisy(net)
    dead(net.lin, 1, bias=0.0)
    dead(net.lin, 2, bias=0.5)  # times a gate that varies: stays
    check(net, rand(1, 3, 5, 5), golden={"lin.out_channels": 5, "gate.weight": (1, 5, 3, 3), "out.in_channels": 5})


def test_constant_gate_of_width_one():
    net = Net(
        lambda s, x: s.out(s.lin(x) * torch.sigmoid(s.gate(x))),
        lin=nn.Linear(4, 6),
        gate=nn.Linear(4, 1),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.gate, 0)
    dead(net.lin, 2)
    check(net, rand(2, 4), golden={"lin.out_features": 5, "gate": Constant})


def test_width_that_becomes_one_next_to_broadcasting():
    net = Net(lambda s, x: s.out(s.a(x) * s.b(x)), a=nn.Linear(4, 6), b=nn.Linear(4, 6), out=nn.Linear(6, 2))
    noisy(net)
    unread(net.out, 0, 1, 2, 4, 5)
    check(net, rand(6, 4), golden={"a.out_features": 1, "b.out_features": 1, "out.in_features": 1})


def test_width_that_becomes_one_next_to_squeeze():
    net = Net(lambda s, x: s.out(s.lin(x).squeeze()), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2))
    unread(net.out, 0, 1, 2, 4, 5)
    check(net, rand(3, 4))


def test_outer_sum_of_channels_against_channels():
    """(B, C, 1) + (B, 1, C): each channel of one side meets each of the other."""
    net = Net(
        lambda s, x: s.out(torch.tanh(s.a(x)[:, :, None] + s.b(x)[:, None, :])),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.a, 1)
    unread(net.out, 2, 3)
    check(net, rand(2, 4), golden={"a.out_features": 6, "b.out_features": 4, "out.in_features": 4})


def test_channels_that_meet_along_different_dimensions():
    """(B, C, L) + (B, L, C) with C == L: the same numbers, other dimensions."""
    net = Net(lambda s, x: s.out((y := s.lin(x)) + y.transpose(1, 2)), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2))
    unread(net.out, 2, 3)
    dead(net.lin, 3)
    check(net, rand(2, 6, 4), golden={"lin.out_features": 6})


@pytest.mark.parametrize("shape", [(6, 1, 1), (1, 6, 1, 1)])
def test_layer_scale(shape):
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.gamma * s.block(y)),
        stem=nn.Conv2d(3, 6, 1),
        block=nn.Conv2d(6, 6, 1),
        head=nn.Conv2d(6, 2, 1),
        gamma=nn.Parameter(torch.rand(shape) + 0.5),
    )
    noisy(net)
    with torch.no_grad():
        net.gamma.flatten()[2] = 0
    dead(net.stem, 1, 2)
    dead(net.block, 1)
    left = tuple(4 if s == 6 else s for s in shape)
    check(net, rand(1, 3, 4, 4), golden={"stem.out_channels": 4, "block.out_channels": 4, "gamma": left})


def test_layer_scale_that_is_zero_while_the_stream_lives():
    """Stream channel 2 stays, and with it the row of the block: they are one channel of a sum."""
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.gamma * s.b(torch.relu(s.a(y)))),
        stem=nn.Linear(4, 6),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 6),
        head=nn.Linear(6, 2),
        gamma=nn.Parameter(torch.ones(6)),
    )
    noisy(net)
    with torch.no_grad():
        net.gamma[2] = 0
        net.b.weight[[0, 1, 3, 4, 5], 7] = 0  # hidden unit 7 only reaches the channel that gamma closes
    check(net, rand(2, 4), golden={"stem.out_features": 6, "b.out_features": 6})


def test_scalar_parameter_and_scalar_ops():
    net = Net(
        lambda s, x: s.out(torch.exp(s.temperature) * s.lin(x) / math.sqrt(2) - 1),
        lin=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
        temperature=nn.Parameter(torch.tensor(0.3)),
    )
    noisy(net)
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"lin.out_features": 5}, gradients=False)  # temperature: see PReLU above


def test_a_number_that_depends_on_a_width():
    """Division by the number of channels: an int, so it must not follow the narrower width."""
    net = Net(
        lambda s, x: s.out((h := torch.tanh(s.lin(x))) / h.size(-1)), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2)
    )
    dead(net.lin, 1)
    check(net, rand(2, 4))


def test_a_tensor_made_from_a_width():
    net = Net(
        lambda s, x: s.out((h := torch.tanh(s.lin(x))) / torch.sqrt(torch.tensor(h.size(-1), dtype=h.dtype))),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4))


def test_a_full_tensor_made_from_a_width():
    net = Net(
        lambda s, x: s.out(torch.tanh(h := s.lin(x)) * torch.full((1,), h.size(-1), dtype=h.dtype)),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4))


def test_a_number_of_groups_made_from_a_width():
    """Six channels are shuffled in two groups; four would be in one."""
    net = Net(
        lambda s, x: s.out(
            torch.tanh(torch.channel_shuffle(h := s.lin(x)[..., None, None], h.size(1) // 3))[..., 0, 0]
        ),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
    )
    dead(net.lin, 1, 4)
    check(net, rand(2, 4), golden={"lin.out_features": 6})


def test_a_tensor_created_inside_fixes_the_width_it_meets():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.lin(x)) + torch.linspace(0, 1, 6, dtype=x.dtype)),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"lin.out_features": 6})
