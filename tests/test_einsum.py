"""Einsum is traced as the permutes and the matmul it stands for."""

from __future__ import annotations

import pytest
import torch
from check import check, close, noisy
from hypothesis import given
from hypothesis import strategies as st
from nets import Net, dead, rand, unread
from torch import nn

from squeeze_release.trace import trace
from squeeze_release.trace.einsum import EinsumAsMatmul

INDICES = st.text("abcde", min_size=1, max_size=4).filter(lambda names: len(set(names)) == len(names))


@given(left=INDICES, right=INDICES, data=st.data())
def test_the_product_is_that_of_torch(left, right, data):
    every = sorted({*left, *right})
    out = data.draw(st.permutations(every).map("".join))[: data.draw(st.integers(0, len(every)))]
    sizes = {i: data.draw(st.integers(1, 3)) for i in every}
    a, b = (rand(*[sizes[i] for i in names]) for names in (left, right))
    want = torch.einsum(f"{left},{right}->{out}", a, b)
    with EinsumAsMatmul():
        got = torch.einsum(f"{left}, {right} -> {out}", [a, b])
    close(got, want)


@pytest.mark.parametrize("equation", ["...d,...d->...", "bid,bjd", "bii,bij->bj", "bij->bji", "bi,bj,bk->bijk"])
def test_other_einsums_stay_as_they_are(equation):
    operands = [rand(*[3] * len(names.replace("...", "ab"))) for names in equation.partition("->")[0].split(",")]
    want = torch.einsum(equation, *operands)
    with EinsumAsMatmul():
        close(torch.einsum(equation, *operands), want)
    net = Net(lambda s, *x: torch.einsum(equation, *x))
    assert "aten.einsum.default" in [str(node.target) for node in trace(net, (tuple(operands), {})).nodes]


def test_an_operand_that_is_broadcast_stays_as_it_is():
    a, b = rand(2, 1), rand(2, 3)
    with EinsumAsMatmul():
        close(torch.einsum("bi,bi->b", a, b), (a * b).sum(1))


def attention() -> Net:
    def run(s, x):
        q, k, v = (lin(x).unflatten(-1, (2, -1)).transpose(1, 2) for lin in (s.q, s.k, s.v))
        scores = (torch.einsum("b h i d, b h j d -> b h i j", q, k) / 2).softmax(-1)
        return s.out(torch.einsum("bhij,bhjd->bihd", scores, v).flatten(2))

    net = Net(run, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), out=nn.Linear(8, 3))
    return noisy(net)  # type: ignore[return-value]


def test_attention_written_with_einsum():
    net = attention()
    unread(net.out, 1, 6)  # a value dimension in each head
    dead(net.q, 2, 5, bias=0.0)  # a query dimension in each head
    golden = {"q.out_features": 6, "k.out_features": 6, "v.out_features": 6, "out.in_features": 6}
    check(net, rand(2, 5, 6), golden=golden)


def test_attention_written_with_einsum_keeps_a_head_that_is_read():
    net = attention()
    unread(net.out, 1)
    dead(net.q, 2, bias=0.0)
    check(net, rand(2, 5, 6), golden={"q.out_features": 8, "v.out_features": 8})


def test_linear_written_with_einsum():
    """The weight is a tensor like any other here: what is summed over goes where one side is 0."""
    net = Net(
        lambda s, x: s.out(torch.tanh(torch.einsum("btc,cd->btd", torch.tanh(s.a(x)), s.w))),
        a=nn.Linear(4, 6),
        w=nn.Parameter(torch.randn(6, 5)),
        out=nn.Linear(5, 2),
    )
    noisy(net)
    dead(net.a, 1, bias=0.0)
    dead(net.a, 2, bias=0.5)  # a constant, but a product has no bias to take it
    with torch.no_grad():
        net.w[3] = 0
    unread(net.out, 4)
    check(net, rand(2, 3, 4), golden={"a.out_features": 4, "w": (4, 4), "out.in_features": 4})
