"""Masks that are looked up in tables of the model: relative positions, windows; and what eval mode keeps of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from check import check, close, noisy, seeded
from nets import rand
from torch import Tensor, nn

import squeeze_release as sr

TOKENS, HEADS = 5, 3


class Relative(nn.Module):
    """A number for every head and offset, looked up by a buffer; in eval mode kept in a dict, as in timm's TinyViT."""

    def __init__(self, how: str = "plain", *, keeps: bool = False) -> None:
        super().__init__()
        self.num_heads, self.how, self.keeps, self.kept = HEADS, how, keeps, {}
        self.q, self.k, self.v, self.proj = (nn.Linear(12, 12) for _ in range(4))
        self.table = nn.Parameter(torch.randn(HEADS, 2 * TOKENS - 1))
        place = torch.arange(TOKENS)
        self.register_buffer("index", place[:, None] - place + TOKENS - 1)
        window = torch.zeros(TOKENS, TOKENS)
        window[:2, 2:] = window[2:, :2] = -100.0
        self.register_buffer("window", window)
        self.register_buffer("hidden", torch.zeros(TOKENS, TOKENS, dtype=torch.bool))

    def train(self, mode: bool = True) -> Relative:
        super().train(mode)
        self.kept = {}
        return self

    def bias(self) -> Tensor:
        if not self.keeps or self.training:
            return self.table[:, self.index]
        if "bias" not in self.kept:
            self.kept["bias"] = self.table[:, self.index]
        return self.kept["bias"]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(len(x), TOKENS, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.bias()
        if self.how == "window":
            bias = bias + self.window
        elif self.how == "log":  # finite here, but nobody knows of what
            bias = bias.abs().log()
        elif self.how == "bool":
            bias = bias.masked_fill(self.hidden, -torch.inf)
        elif self.how == "input":
            bias = bias + x.mean()
        out = F.scaled_dot_product_attention(q, k, v, bias)
        return self.proj(out.transpose(1, 2).flatten(2))


def net(how: str = "plain", *, keeps: bool = False) -> nn.Sequential:
    seeded()
    return noisy(nn.Sequential(nn.Linear(6, 12), Relative(how, keeps=keeps), nn.Linear(12, 3)))


@torch.no_grad()
def kill_values(model: nn.Sequential) -> nn.Sequential:
    """One value channel of each head is the same for every token, and not 0."""
    model[1].v.weight.view(HEADS, 4, 12)[:, 1] = 0
    return model


@torch.no_grad()
def kill_head(model: nn.Sequential) -> nn.Sequential:
    model[1].proj.weight[:, 4:8] = 0
    return model


@pytest.mark.parametrize("how", ["plain", "window"])
def test_constant_values_pass_a_mask_that_finite_tables_make(how: str) -> None:
    check(kill_values(net(how)), rand(2, TOKENS, 6), golden={"1.v.out_features": 9, "1.proj.in_features": 9})


@pytest.mark.parametrize("how", ["log", "bool", "input"])
def test_constant_values_stay_under_a_mask_that_may_hide_a_row(how: str) -> None:
    check(kill_values(net(how)), rand(2, TOKENS, 6), golden={"1.v.out_features": 12, "1.proj.in_features": 12})


@pytest.mark.parametrize("keys", [slice(None), slice(1)])
def test_constant_values_stay_under_a_table_that_may_hide_a_row(keys: slice) -> None:
    """It does where all keys are hidden: fused attention gives 0 there. Where one is, another size may look up more."""
    model = kill_values(net("window"))
    model[1].window[3, keys] = -torch.inf
    small = sr.squeeze(model.double(), rand(2, TOKENS, 6)).model
    assert small[1].v.out_features == 12


@pytest.mark.parametrize("keeps", [False, True])
def test_heads_go_from_the_table(keeps: bool) -> None:
    golden = {"1.num_heads": 2, "1.table": (2, 2 * TOKENS - 1), "1.v.out_features": 8}
    check(kill_head(net(keeps=keeps)), rand(2, TOKENS, 6), golden=golden)


def test_what_was_kept_before_does_not_outlive_the_table() -> None:
    """The model was run in eval mode, so it holds the biases of all heads, under the weights of then."""
    model, x = kill_head(net(keeps=True)).double().eval(), rand(2, TOKENS, 6)
    want = copy.deepcopy(model)(x)
    with torch.no_grad():
        model(x)
    for inplace in (False, True):
        source = copy.deepcopy(model)
        small = sr.squeeze(source, x, inplace=inplace).model
        assert small[1].num_heads == 2 and not small[1].training
        close(small(x), want)


def test_what_a_module_keeps_for_itself_stays() -> None:
    """A dict that does not change when the model runs is left alone, and so are the modes of single modules."""
    model = kill_head(net()).train()
    model[1].names, model[2].training = {"a": 1}, False
    small = sr.squeeze(model.double(), rand(2, TOKENS, 6)).model
    assert small[1].names == {"a": 1} and small[0].training and not small[2].training
