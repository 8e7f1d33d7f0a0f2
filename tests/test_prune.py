"""What may go, in which units, by which score, and that it stays gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune as torch_prune

import squeeze_release as sr
from squeeze_release.modules import narrow_attention
from squeeze_release.prune import (
    AveragedScores,
    Masks,
    Target,
    constant,
    cubic,
    find_targets,
    gradient_times_weight,
    linear,
    magnitude,
    random,
    snip,
    synflow,
    toward_dead_units,
)


def names(targets: list[Target]) -> list[tuple[str, ...]]:
    return [target.names for target in targets]


class Attention(nn.Module):
    """q, k and v side by side, as transformers has them, or packed, as timm has them."""

    def __init__(self, packed: bool, key_width: int = 4) -> None:
        super().__init__()
        if packed:
            self.qkv = nn.Linear(4, 12)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, key_width), nn.Linear(4, key_width)
        self.proj = nn.Linear(4, 4)


# -------------------------------------------------------------------------------------------------------------- targets


def test_linear_goes_by_elements_and_convolutions_by_filters() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3))
    assert [(t.names, t.unit) for t in find_targets(net)] == [(("0.weight",), "filter"), (("4.weight",), "element")]
    masks = Masks(net, find_targets(net))
    assert [tuple(units.shape) for units in masks.units] == [(2, 1, 1, 1), (3, 8)]
    assert [target.slots(net.get_parameter(target.names[0])) for target in masks.targets] == [9, 1]


@pytest.mark.parametrize(
    ("conv", "shape"), [("element", (2, 3, 3, 3)), ("input", (1, 3, 1, 1)), ("filter", (2, 1, 1, 1))]
)
def test_units_of_a_convolution(conv: str, shape: tuple[int, ...]) -> None:
    net = nn.Conv2d(3, 2, 3)
    masks = Masks(net, find_targets(net, conv=conv))
    assert tuple(masks.units[0].shape) == shape
    assert masks.alive == masks.total == 54


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(sr.InputError, match="conv='row' is not a known value"):
        find_targets(nn.Conv2d(1, 1, 1), conv="row")


def test_skipped_modules_and_embeddings_are_left_alone() -> None:
    net = nn.ModuleDict({"table": nn.Embedding(5, 4), "body": nn.Sequential(nn.Linear(4, 4)), "head": nn.Linear(4, 5)})
    assert names(find_targets(net, skip=["body"])) == [("head.weight",)]
    net["head"].weight = net["table"].weight
    assert names(find_targets(net)) == [("body.0.weight",)]


def test_a_shared_layer_counts_once() -> None:
    layer = nn.Linear(4, 4)
    assert len(find_targets(nn.Sequential(layer, nn.ReLU(), layer))) == 1


def test_joint_rows_of_packed_queries_keys_and_values() -> None:
    net = Attention(packed=True)
    (target, *rest) = find_targets(net, joint=True)
    assert (target, names(rest)) == (Target(("qkv.weight",), "filter", 3), [("proj.weight",)])
    masks = Masks(net, [target])
    masks.prune({"qkv.weight": torch.tensor([9.0, 1, 9, 9, 0, 1, 9, 9, 0, 1, 9, 9])[:, None].expand(12, 4)}, keep=0.75)
    # rows 1, 5 and 9 have the lowest score together, though rows 4 and 8 are lower on their own
    assert (net.qkv.weight == 0).all(1).nonzero().flatten().tolist() == [1, 5, 9]


def test_joint_rows_of_separate_projections() -> None:
    net = Attention(packed=False)
    assert find_targets(net, joint=True)[0] == Target(("q_proj.weight", "k_proj.weight", "v_proj.weight"), "filter")
    grouped = Attention(packed=False, key_width=2)  # rows of q have no counterpart: every layer for itself
    assert all(target.unit == "element" for target in find_targets(grouped, joint=True))


def test_joint_rows_of_multihead_attention_also_of_a_squeezed_one() -> None:
    mha = nn.MultiheadAttention(4, 2)
    assert find_targets(mha, joint=True)[0] == Target(("in_proj_weight",), "filter", 3)
    assert find_targets(narrow_attention(mha, 2, 2, 2, 0.5), joint=True)[0] == Target(("in_proj_weight",), "filter", 3)
    assert ("in_proj_weight",) in names(find_targets(mha))


def test_nothing_to_prune() -> None:
    masks = Masks(nn.BatchNorm1d(3), find_targets(nn.BatchNorm1d(3)))
    masks.prune({}, keep=0.5)
    masks.keep()
    assert masks.total == masks.alive == 0


# ------------------------------------------------------------------------------------------------------------ selection


def test_filters_and_weights_compete_for_slots() -> None:
    net = nn.Sequential(nn.Conv1d(1, 2, 4, bias=False), nn.Linear(4, 1, bias=False))  # 2 filters of 4, 4 weights
    masks = Masks(net, find_targets(net))
    scores = {
        "0.weight": torch.tensor([3.0, 1.0]).view(2, 1, 1).expand(2, 1, 4),
        "1.weight": torch.tensor([[4.0, 2, 2, 0]]),
    }
    masks.prune(scores, keep=7 / 12)  # 4 fits (1 slot), the filter of 3 fits (5), both of 2 fit (7), the rest does not
    assert masks.alive == 7
    assert [units.flatten().tolist() for units in masks.units] == [[True, False], [True, True, True, False]]
    assert net[0].weight[1].count_nonzero() == 0


def test_a_filter_that_does_not_fit_ends_the_selection() -> None:
    net = nn.Sequential(nn.Conv1d(1, 1, 4, bias=False), nn.Linear(4, 1, bias=False))
    masks = Masks(net, find_targets(net))
    masks.prune({"0.weight": torch.full((1, 1, 4), 3.0), "1.weight": torch.tensor([[4.0, 2, 2, 0]])}, keep=4 / 8)
    assert masks.alive == 1  # at most what was asked for, and nothing that ranks below what did not fit


def test_layer_by_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    masks = Masks(net, find_targets(net))
    scores = {"0.weight": torch.arange(8.0).view(2, 4), "1.weight": 100 + torch.arange(8.0).view(4, 2)}
    masks.prune(scores, keep=0.5, scope="layer")
    assert [int(units.sum()) for units in masks.units] == [4, 4]
    masks.prune(scores, keep=0.25, scope="global")
    assert [int(units.sum()) for units in masks.units] == [0, 4]
    with pytest.raises(sr.InputError, match="scope='block'"):
        masks.prune(scores, keep=0.1, scope="block")


def test_what_is_dead_stays_dead() -> None:
    net = nn.Linear(8, 8)
    masks = Masks(net, find_targets(net))
    masks.prune(magnitude(net), keep=0.25)
    dead = net.weight == 0
    masks.prune(
        {"weight": torch.where(dead, 10.0, 0.1)}, keep=0.5
    )  # more room than is alive, and high scores for the dead
    assert torch.equal(net.weight == 0, dead)
    assert masks.alive == 16


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.1)])
def test_masks_hold_through_optimizer_steps(make: object) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = make(net.parameters())  # type: ignore[operator]
    masks = Masks(net, find_targets(net))
    optimizer.register_step_post_hook(masks.keep)
    for step in range(4):
        optimizer.zero_grad()
        F.mse_loss(net(torch.randn(16, 4)), torch.randn(16, 2)).backward()
        optimizer.step()
        if step == 1:
            masks.prune(gradient_times_weight(net), keep=0.5)
    assert masks.alive == sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2])) == 24


def test_masks_are_read_by_torch_prune_and_by_squeeze() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    masks = Masks(net, find_targets(net))
    scores = {"0.weight": torch.arange(8.0)[:, None].expand(8, 6).clone(), "2.weight": torch.ones(2, 8) * 9}
    masks.prune(scores, keep=(16 + 12) / 64)  # the last two rows of the first layer stay, and all of the second
    small, report = sr.squeeze(net, torch.randn(3, 6))
    assert small[0].out_features == 2
    for name, mask in masks.named().items():
        torch_prune.custom_from_mask(net.get_submodule(name.partition(".")[0]), "weight", mask)
    assert sr.squeeze(net, torch.randn(3, 6)).report.params_after == report.params_after
    assert report.mask_alive == sum(int(p.count_nonzero()) for p in net.buffers()) + 10  # and the biases


# --------------------------------------------------------------------------------------------------- scores, schedules


def test_schedules() -> None:
    assert [cubic(p) for p in (0, 1)] == [1.0, 0.002]
    assert cubic(0.5) == pytest.approx(0.002 + 0.998 / 8)
    assert [linear(p, first=1.0, last=0.5) for p in (0, 0.5, 1)] == [1.0, 0.75, 0.5]
    assert [constant(p, last=0.1) for p in (0, 0.01, 1)] == [1.0, 0.1, 0.1]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _loss(net: nn.Module) -> Tensor:
    return net(torch.arange(6.0).view(2, 3)).square().sum()


def test_gradient_times_weight_wants_gradients() -> None:
    net = _net()
    with pytest.raises(sr.InputError, match="no parameter has a gradient"):
        gradient_times_weight(net)
    _loss(net).backward()
    assert torch.equal(gradient_times_weight(net)["0.weight"], (net[0].weight.grad * net[0].weight).abs())


def test_snip_is_gradient_times_weight_of_a_batch_and_leaves_no_gradient() -> None:
    net = _net()
    scores = snip(net, _loss)
    assert all(p.grad is None for p in net.parameters())
    _loss(net).backward()
    assert torch.equal(scores["2.weight"], gradient_times_weight(net)["2.weight"])


def test_synflow_is_positive_and_conserved_from_layer_to_layer() -> None:
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False))
    before = [p.clone() for p in net.parameters()]
    scores = synflow(net, torch.randn(4, 3))
    assert all(bool((score > 0).all()) for score in scores.values())
    assert scores["0.weight"].sum().item() == pytest.approx(scores["2.weight"].sum().item())  # what flows in flows out
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_averaged_scores_are_the_sum_over_steps() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    averaged = AveragedScores(net, ["0.weight"])
    optimizer.register_step_pre_hook(averaged.see)
    expected = torch.zeros(5, 3)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(net).backward()
        expected += gradient_times_weight(net)["0.weight"]
        optimizer.step()
    assert torch.allclose(averaged(net)["0.weight"], expected)
    assert averaged(net)["0.weight"].sum() == 0  # a new epoch begins


def test_random_scores_follow_their_generator() -> None:
    first, again, other = (random(_net(), torch.Generator().manual_seed(seed))["0.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_nearly_dead_units_go_first() -> None:
    scores = {"weight": torch.tensor([[1.0, 5, 5], [1.0, 0, 0], [1.0, 5, 5]])}
    changed = toward_dead_units(scores, ["weight"])["weight"]
    assert changed[1, 0] < changed[0, 0]  # the last of its row, and one of many
    assert scores["weight"][1, 0] == scores["weight"][0, 0]
