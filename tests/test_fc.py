"""The paper's FC net: every way a unit can die, its golden width, and the twin that must stay."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import counting
import pytest
import torch
from check import assert_same, check, error, noisy, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import squeeze_release as sr

WIDTHS = [784, 128, 256, 128, 128, 64, 10]
Masker = Callable[[list[nn.Linear]], object]


def fc_net(widths: list[int] = WIDTHS, flatten: bool = False) -> nn.Sequential:
    seeded()
    layers: list[nn.Module] = [nn.Flatten()] if flatten else []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.BatchNorm1d(o), nn.SELU()]
    return noisy(nn.Sequential(*layers[:-2])).eval()  # type: ignore[return-value]


def linears(net: nn.Module) -> list[nn.Linear]:
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


def widths_of(net: nn.Module) -> list[int]:
    """Widths along the chain; every layer and BatchNorm must agree with its neighbours."""
    chain = linears(net)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    assert [layer.out_features for layer in chain[:-1]] == [norm.num_features for norm in norms]
    assert [layer.out_features for layer in chain[:-1]] == [layer.in_features for layer in chain[1:]]
    assert all(tuple(layer.weight.shape) == (layer.out_features, layer.in_features) for layer in chain)
    return [layer.in_features for layer in chain] + [chain[-1].out_features]


def counted(net: nn.Module) -> list[int]:
    gammas = [module.weight == 0 for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    return counting.fc_widths([layer.weight.detach() for layer in linears(net)], gammas)


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, 784, dtype=torch.float64)


def norm_of(net: nn.Sequential, layer: nn.Linear) -> nn.BatchNorm1d:
    return net[list(net).index(layer) + 1]  # type: ignore[return-value]


# ---------------------------------------------------------------- masks: what dies


def dead_rows(w: list[Tensor]) -> None:
    w[1][:50] = 0


def dead_columns(w: list[Tensor]) -> None:
    w[2][:, 10:50] = 0


def dead_rows_and_columns(w: list[Tensor]) -> None:
    w[1][:30] = 0
    w[2][:, 20:60] = 0


def cascade_of_constants(w: list[Tensor]) -> None:
    w[0][:100] = 0  # 100 constants, and from there units that read nothing but constants
    w[1][:56, 100:] = 0
    w[2][:28, 56:] = 0
    w[3][:14, 28:] = 0
    w[4][:7, 14:] = 0


def cascade_of_unread(w: list[Tensor]) -> None:
    w[5][:, :32] = 0
    w[4][32:, :64] = 0
    w[3][64:, :100] = 0


def both_cascades_meet(w: list[Tensor]) -> None:
    cascade_of_constants(w)
    w[3][100:] = 0  # constants in the middle of what
    w[5][:, 50:] = 0  # nobody reads at the end
    w[4][:50, 90:100] = 0


def unread_inputs(w: list[Tensor]) -> None:
    w[0][:, ::2] = 0


def inputs_of_dead_units(w: list[Tensor]) -> None:
    w[1][:, :64] = 0  # the first 64 units are unread, and
    w[0][64:, 700:] = 0  # the last 84 inputs are read by those alone


DIES: dict[str, tuple[Masker, list[int]]] = {
    "dead_rows": (dead_rows, [784, 128, 206, 128, 128, 64, 10]),
    "dead_columns": (dead_columns, [784, 128, 216, 128, 128, 64, 10]),
    "dead_rows_and_columns": (dead_rows_and_columns, [784, 128, 196, 128, 128, 64, 10]),
    "cascade_of_constants": (cascade_of_constants, [784, 28, 200, 100, 114, 57, 10]),
    "cascade_of_unread": (cascade_of_unread, [784, 128, 256, 28, 64, 32, 10]),
    "both_cascades_meet": (both_cascades_meet, [784, 28, 200, 100, 76, 43, 10]),
    "unread_inputs": (unread_inputs, [392, 128, 256, 128, 128, 64, 10]),
    "inputs_of_dead_units": (inputs_of_dead_units, [700, 64, 256, 128, 128, 64, 10]),
}


@pytest.mark.parametrize("case", DIES)
def test_what_is_dead_goes(case: str) -> None:
    mask, golden = DIES[case]
    net = fc_net()
    with torch.no_grad():
        mask([layer.weight for layer in linears(net)])
    assert counted(net) == golden
    small, report = check(net, inputs())
    assert widths_of(small) == golden, str(report)
    assert report.params_after == counting.fc_params(golden)
    assert report.params_before == counting.fc_params(WIDTHS)
    for batch in (1, 5):
        assert_same(net, small, (inputs(batch),), {})


def test_gamma_0_makes_a_constant() -> None:
    net = fc_net()
    with torch.no_grad():
        norm_of(net, linears(net)[1]).weight[:11] = 0
        norm_of(net, linears(net)[4]).weight[:5] = 0
    small, _ = check(net, inputs())
    assert widths_of(small) == counted(net) == [784, 128, 245, 128, 128, 59, 10]


def test_unread_inputs_leave_by_an_index_and_the_model_takes_the_full_input() -> None:
    net = fc_net()
    with torch.no_grad():
        unread_inputs([layer.weight for layer in linears(net)])
    small, _ = check(net, inputs())
    first = linears(small)[0]
    assert isinstance(first, nn.Linear) and type(first).__name__ == "IndexedLinear"
    assert torch.equal(first.index, torch.arange(1, 784, 2))
    assert small(inputs(3)).shape == (3, 10)


def test_unread_inputs_behind_flatten() -> None:
    net = fc_net(flatten=True)
    with torch.no_grad():
        unread_inputs([layer.weight for layer in linears(net)])
    small, _ = check(net, torch.randn(2, 1, 28, 28, dtype=torch.float64))
    assert widths_of(small) == [392, *WIDTHS[1:]]


# ---------------------------------------------------------------- negative twins: what only looks dead


def row_that_sums_to_zero(w: list[Tensor]) -> None:
    w[1][:3] = 0
    w[1][:3, 5], w[1][:3, 6] = 0.5, -0.5


def column_that_sums_to_zero(w: list[Tensor]) -> None:
    w[2][:, :3] = 0
    w[2][7, :3], w[2][8, :3] = 0.5, -0.5


def zero_row_of_the_output_layer(w: list[Tensor]) -> None:
    w[5][3:5] = 0


def row_with_one_tiny_weight(w: list[Tensor]) -> None:
    w[1][:3] = 0
    w[1][:3, 9] = 1e-6


def reads_constants_and_one_living_unit(w: list[Tensor]) -> None:
    w[1][0, 1:] = 0


def input_read_once(w: list[Tensor]) -> None:
    w[0][1:, :5] = 0


STAYS: list[Masker] = [
    row_that_sums_to_zero,
    column_that_sums_to_zero,
    zero_row_of_the_output_layer,
    row_with_one_tiny_weight,
    reads_constants_and_one_living_unit,
    input_read_once,
]


@pytest.mark.parametrize("mask", STAYS, ids=lambda mask: mask.__name__)
def test_what_only_looks_dead_stays(mask: Masker) -> None:
    net = fc_net()
    with torch.no_grad():
        mask([layer.weight for layer in linears(net)])
    assert counted(net) == WIDTHS
    small, report = check(net, inputs(), again=False)
    assert widths_of(small) == WIDTHS, str(report)
    assert report.params_after == report.params_before and not report.slices


def test_a_zero_output_row_is_explained() -> None:
    net = fc_net()
    with torch.no_grad():
        zero_row_of_the_output_layer([layer.weight for layer in linears(net)])
    _, report = sr.squeeze(net, inputs().float(), verify=False)
    assert [(kept.name, kept.what, kept.count) for kept in report.kept] == [("15", "outputs", 2)]
    assert "output of the model" in report.kept[0].reason


# ---------------------------------------------------------------- sizes are what counting allows


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98, 0.99, 0.995])
def test_random_masks_reach_the_fixed_point(share: float) -> None:
    net = fc_net()
    counting.sparsify(share, *(layer.weight for layer in linears(net)))
    small, report = check(net, inputs())
    golden = counted(net)
    assert min(golden) > 0 and (share < 0.9 or golden != WIDTHS)
    assert widths_of(small) == golden, str(report)
    assert report.params_after == counting.fc_params(golden)
    assert report.weights_after == sum(i * o for i, o in itertools.pairwise(golden))
    assert report.mask_alive == sum(int((p != 0).sum()) for p in net.parameters())


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_a_constant_function(layer: int) -> None:
    """A layer without a weight: nothing but the ten numbers of the output is left."""
    net = fc_net()
    with torch.no_grad():
        linears(net)[layer].weight.zero_()
    small, report = check(net, inputs(), gradients=False)
    assert report.params_after <= 2 * 10  # the numbers, or a 10 x 1 weight with their bias
    out = small(inputs(7))
    assert out.shape == (7, 10) and torch.equal(out, out[:1].expand(7, 10))


def test_a_network_cut_in_the_middle_by_two_masks_is_a_constant_too() -> None:
    net = fc_net()
    with torch.no_grad():
        linears(net)[2].weight[:, :128] = 0  # reads only the second half, and
        linears(net)[1].weight[128:] = 0  # the second half sees nothing
    small, report = check(net, inputs(), gradients=False)
    assert report.params_after <= 20 and small(inputs(3)).shape == (3, 10)


# ---------------------------------------------------------------- forms, dtypes, cycles


def test_prune_parametrize_and_plain_zeros_give_the_same_network() -> None:
    plain = fc_net()
    masks = [(torch.rand_like(layer.weight) > 0.99).float() for layer in linears(plain)]
    pruned, parametrized = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for layer, mask in zip(linears(plain), masks, strict=True):
            layer.weight.mul_(mask)
    for layer, mask in zip(linears(pruned), masks, strict=True):
        prune.custom_from_mask(layer, "weight", mask)
    for layer, mask in zip(linears(parametrized), masks, strict=True):
        parametrize.register_parametrization(layer, "weight", counting.Masked(mask))
    nets = [sr.squeeze(net, torch.randn(2, 784), verify=False) for net in (plain, pruned, parametrized)]
    want = nets[0].model.state_dict()
    assert widths_of(nets[0].model) == counted(plain) != WIDTHS
    for net, report in nets[1:]:
        have = net.state_dict()
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
        assert not any(prune.is_pruned(module) or parametrize.is_parametrized(module) for module in net.modules())
        assert (report.mask_alive, report.params_after) == (nets[0].report.mask_alive, nets[0].report.params_after)


@pytest.mark.parametrize("rules", ["A", "AB", "paper"])
def test_every_rule_set_does_all_of_an_fc_net(rules: str) -> None:
    net = fc_net()
    with torch.no_grad():
        both_cascades_meet([layer.weight for layer in linears(net)])
    small, _ = check(net, inputs(), rules=rules, again=False, gradients=False)
    assert widths_of(small) == counted(net)


def test_float32_is_exact_to_1e_5() -> None:
    net = fc_net()
    counting.sparsify(0.99, *(layer.weight for layer in linears(net)))
    small, report = sr.squeeze(net, torch.randn(2, 784))
    x = torch.randn(64, 784)
    with torch.no_grad():
        assert error(net(x), small(x)) <= 1e-5
    assert report.max_error is not None and report.max_error <= 1e-10


def test_squeeze_train_prune_squeeze_again() -> None:
    net = fc_net().double()
    counting.sparsify(0.95, *(layer.weight for layer in linears(net)))
    small, first = check(net, inputs())
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(small(inputs(8)), torch.randint(10, (8,))).backward()
        optimizer.step()
    small.eval()
    assert counted(small) == widths_of(small)  # training filled every zero it left
    counting.sparsify(0.9, *(layer.weight for layer in linears(small)), seed=1)
    smaller, second = check(small, inputs())
    assert widths_of(smaller) == counted(small) and second.params_after < first.params_after
    assert smaller(inputs(3)).shape == (3, 10)


def test_train_mode_is_left_as_it_was() -> None:
    net = fc_net().train()
    net[1].eval()
    with torch.no_grad():
        dead_rows([layer.weight for layer in linears(net)])
    small, _ = sr.squeeze(net, torch.randn(4, 784), verify=False)
    assert [module.training for module in small.modules()] == [module.training for module in net.modules()]


@pytest.mark.parametrize("name", ["3", "6"])
def test_keep_holds_a_layer_at_its_width(name: str) -> None:
    net = fc_net()
    with torch.no_grad():
        dead_rows([layer.weight for layer in linears(net)])
    small, _ = sr.squeeze(net, torch.randn(2, 784), keep=[name], verify=False)
    assert widths_of(small) == WIDTHS
