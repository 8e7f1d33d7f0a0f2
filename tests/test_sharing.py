"""Modules and weights used more than once or never; inputs and outputs of any kind."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from test_blocks import Block, kill, network
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squeeze_release.modules import Shift

# ----------------------------------------------------------------------------------------------- weights used elsewhere


def test_weight_of_a_linear_read_elsewhere():
    """The penalty reads all rows and columns."""
    net = Net(
        lambda s, x: (s.out(torch.tanh(s.lin(x))), s.lin.weight.square().sum(), s.out.weight.abs().mean()),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 3),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"lin.out_features": 6, "out.in_features": 6})


@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_two_linears_share_a_weight(biases):
    a, b = (nn.Linear(6, 5, bias=bias) for bias in biases)
    b.weight = a.weight
    net = Net(
        lambda s, x: s.out(s.a(torch.tanh(s.one(x))) * s.b(torch.tanh(s.two(x)))),
        one=nn.Linear(4, 6),
        two=nn.Linear(4, 6),
        a=a,
        b=b,
        out=nn.Linear(5, 2),
    )
    noisy(net)
    for layer in (net.one, net.two):
        dead(layer, 1, bias=0.3)
    dead(net.two, 2, bias=0.3)  # but not in `one`: stays
    squeezed = check(net, rand(2, 4), golden={"one.out_features": 5, "two.out_features": 5, "a.weight": (5, 5)})
    assert squeezed.model.a.weight is squeezed.model.b.weight


def test_two_linears_share_a_weight_and_see_different_constants():
    a, b = nn.Linear(6, 5), nn.Linear(6, 5)
    b.weight = a.weight
    net = Net(
        lambda s, x: s.a(torch.tanh(s.one(x))) * s.b(torch.tanh(s.two(x))),
        one=nn.Linear(4, 6),
        two=nn.Linear(4, 6),
        a=a,
        b=b,
    )
    noisy(net)
    dead(net.one, 1, bias=0.3)
    dead(net.two, 1, bias=-0.4)
    check(net, rand(2, 4), golden={"one.out_features": 6, "a.weight": (5, 6)})


def test_a_bias_that_two_layers_share():
    a, b = nn.Linear(6, 5), nn.Linear(6, 5)
    b.bias = a.bias
    net = Net(
        lambda s, x: s.a(torch.tanh(s.one(x))) * s.b(x[:, :1].expand(-1, 6)), one=noisy(nn.Linear(4, 6)), a=a, b=b
    )
    dead(net.one, 1)
    check(net, rand(2, 4))


def test_a_linear_called_on_the_input_and_on_a_hidden_layer():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.shared(torch.tanh(s.shared(x))))),
        shared=noisy(nn.Linear(6, 6)),
        out=nn.Linear(6, 2),
    )
    unread(net.shared, 2)
    unread(net.out, 2)
    check(net, rand(2, 6))


# ----------------------------------------------------------------------------------------------- shared, unused, unread


def test_linear_called_twice_on_constants_that_agree():
    net = Net(
        lambda s, x: s.out(s.shared(torch.relu(s.a(x)))) + s.out(s.shared(torch.relu(s.b(x)))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        shared=nn.Linear(6, 5),
        out=nn.Linear(5, 2),
    )
    noisy(net)
    for layer in (net.a, net.b):
        dead(layer, 1, bias=0.6)
    dead(net.a, 2, bias=0.6)
    dead(net.b, 2, bias=0.7)
    unread(net.out, 4)
    check(net, rand(2, 4), golden={"a.out_features": 5, "b.out_features": 5, "shared.weight": (4, 5)})


def test_recurrent_use_of_a_cell():
    def run(s, x):
        h = torch.tanh(s.into(x[:, 0]))
        for t in range(1, x.size(1)):
            h = torch.tanh(s.into(x[:, t]) + s.cell(h))
        return s.out(h)

    net = noisy(Net(run, into=nn.Linear(4, 6), cell=nn.Linear(6, 6), out=nn.Linear(6, 2)))
    unread(net.out, 1)
    unread(net.cell, 1)  # channel 1 is read by nobody
    dead(net.into, 2, bias=0.0)
    dead(net.cell, 2, bias=0.0)  # channel 2 is 0 from the first step on
    check(net, rand(2, 3, 4), golden={"into.out_features": 4, "cell.weight": (4, 4), "out.in_features": 4})


def test_unused_parameters_and_modules_stay():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.lin(x))),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
        never=nn.Linear(6, 5),
        spare=nn.Parameter(torch.zeros(7)),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"lin.out_features": 5, "never.weight": (5, 6), "spare": (7,)})


def test_auxiliary_head_still_runs_in_training():
    """The trace of eval mode never sees the auxiliary head: what feeds it keeps its width, or training breaks."""

    def run(s, x):
        h = torch.tanh(s.lin(x))
        return (s.out(h), s.aux(h)) if s.training else s.out(h)

    net = noisy(Net(run, lin=nn.Linear(4, 6), out=nn.Linear(6, 2), aux=nn.Linear(6, 3)))
    dead(net.lin, 1)
    small = check(net, rand(2, 4), golden={}).model.train()
    old, new = net.train()(x := rand(2, 4)), small(x)
    assert all(torch.allclose(a, b) for a, b in zip(old, new, strict=True))


def test_parameter_used_directly():
    net = Net(
        lambda s, x: s.out(torch.relu(s.lin(x)) * s.gain + s.offset),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
        gain=nn.Parameter(torch.rand(6)),
        offset=nn.Parameter(torch.rand(6)),
    )
    dead(net.lin, 1)
    with torch.no_grad():
        net.gain[3] = 0
    check(net, rand(2, 4), golden={"lin.out_features": 4, "gain": (4,), "offset": (4,)})


def test_parameter_that_is_an_output_keeps_its_width():
    net = Net(
        lambda s, x: (s.out(torch.relu(s.lin(x)) * s.gain), s.gain),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 2),
        gain=nn.Parameter(torch.rand(6)),
    )
    dead(net.lin, 1)
    check(net, rand(2, 4), golden={"gain": (6,), "lin.out_features": 6})


# -------------------------------------------------------------------------------------------------- inputs and outputs


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


pytree.register_dataclass(Result)
Pair = namedtuple("Pair", "logits hidden")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y, h: {"logits": y, "hidden": h},
        lambda y, h: (y, [h, {"again": y}]),
        Result,
        Pair,
        lambda y, h: (y, h, None, 3),
    ],
)
def test_outputs_of_any_kind_keep_their_width(wrap):
    net = Net(
        lambda s, x: wrap(s.out(s.mid(h := torch.tanh(s.lin(x)))), h),
        lin=nn.Linear(4, 6),
        mid=nn.Linear(6, 5),
        out=nn.Linear(5, 2),
    )
    noisy(net)
    dead(net.lin, 1)  # constant, but an output
    dead(net.mid, 2)
    check(net, rand(2, 4), golden={"lin.out_features": 6, "mid.weight": (4, 6)}, again=True)


def test_several_inputs_and_keywords():
    net = Net(
        lambda s, a, b, *, c, flag=True: s.out(torch.relu(s.a(a) + s.b(b)) + (s.c(c["x"]) if flag else 0)),
        a=nn.Linear(4, 6),
        b=nn.Linear(5, 6),
        c=nn.Linear(3, 6),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    for layer in (net.a, net.b, net.c):
        dead(layer, 1)
    unread(net.b, 0)
    check(
        net,
        (rand(2, 4), rand(2, 5)),
        {"c": {"x": rand(2, 3)}, "flag": True},
        golden={"a.out_features": 5, "b.weight": (5, 4)},
    )


def test_input_that_is_also_an_output():
    net = Net(lambda s, x: (x, s.out(torch.tanh(s.lin(x)))), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2))
    dead(net.lin, 1)
    unread(net.lin, 0)
    check(net, rand(2, 4), golden={"lin.weight": (5, 3)})


def test_calls_that_take_different_paths():
    def run(s, x, extra=None):
        h = torch.tanh(s.lin(x))
        return s.out(h) if extra is None else s.out(h) + s.other(h * extra)

    net = noisy(Net(run, lin=nn.Linear(4, 6), out=nn.Linear(6, 2), other=nn.Linear(6, 2)))
    unread(net.out, 1, 2)
    unread(net.other, 2, 3)
    dead(net.lin, 5)
    check(
        net, [(rand(2, 4),), (rand(2, 4), rand(2, 1))], golden={"lin.out_features": 5}
    )  # 5 is no constant once it is scaled


def test_batch_of_one_and_a_single_token():
    net = network(Block(), Block())
    kill(net.blocks[0])
    dead(net.blocks[1].a, 1)
    check(net, rand(1, 4), golden={"blocks.0": Shift, "blocks.1.a.out_features": 7})
    check(net, rand(1, 1, 4), golden={"blocks.0": Shift, "blocks.1.a.out_features": 7})


def test_kept_reasons_name_the_reader():
    net = network(Block())
    dead(net.stem, 1)
    assert "blocks.0.b" in (text := reasons(check(net, rand(2, 4)).report)) or "head" in text or "blocks.0" in text
