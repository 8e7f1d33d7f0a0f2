"""Random networks, and the kinds of them that once came out wrong: `make fuzz` draws many more."""

from __future__ import annotations

from collections.abc import Callable

import networks as nets
import pytest
import torch
from attack import attack, attack_all
from hypothesis import HealthCheck, given, settings
from networks import Case, case_of
from networks.strategy import cases
from torch import Tensor, nn

import squeeze_release as sr


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_networks(case: Case) -> None:
    attack(case)


# --------------------------------------------------------------------------------- found by `make fuzz`, and neighbours


def case(body: list[nn.Module], how: str, width: int, outputs: int, inputs: Tensor) -> Case:
    """A head over a body, with numbers everywhere: none is 0 or 1 by accident."""
    model = nets.Head(nn.Sequential(*body), how, width, outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7)
    return Case(model.double().eval(), inputs.double(), "once wrong")


@torch.no_grad()
def zero(layer: nn.Module) -> None:
    layer.weight.zero_()


def constant_function_after_batch_norm() -> Case:
    """Squeezed twice: the stand-in for the body is not replaced again."""
    found = case([nn.BatchNorm1d(2)], "none", 2, 1, torch.randn(3, 2))
    zero(found.model.out)
    return found


def class_token_and_a_constant_head() -> Case:
    """Nobody reads the numbers of the tokens, but the output has as many positions as there are tokens."""
    attention = nn.Sequential(nn.Identity(), nets.Attention(4, 2, 2, "packed"))
    found = case([nets.Tokens(4, 4), attention], "none", 4, 2, torch.randn(2, 4, 4))
    zero(found.model.out)
    return found


def token_mixing_and_a_constant_head() -> Case:
    """Nobody reads the hidden tokens, but they have a width."""
    found = case([nn.Sequential(nn.Identity(), nets.TokenMix(4, 3))], "none", 4, 1, torch.randn(2, 4, 4))
    zero(found.model.out)
    return found


def dead_residual_in_a_sequential() -> Case:
    """The residual comes down to a shift; the Sequential around it must not be passed through without that."""
    found = case([nets.Residual(nn.Sequential(nn.Linear(3, 3)))], "none", 3, 2, torch.randn(3, 3))
    zero(found.model.body[0].body[0])
    return found


def dead_residual_with_a_scale() -> Case:
    found = case([nets.Residual(nn.Sequential(nn.Linear(3, 3)), 3), nn.ReLU()], "none", 3, 2, torch.randn(3, 3))
    zero(found.model.body[0].body[0])
    return found


def gate_whose_hidden_unit_fills_a_width() -> Case:
    """The gate is constant, so no hidden unit is needed; one stays all the same, and its inputs need not."""
    found = case([nn.Conv2d(3, 4, 1), nets.SqueezeExcite(4, 2)], "mean", 4, 2, torch.randn(2, 3, 5, 5))
    zero(found.model.body[1].expand)
    return found


def gate_with_one_live_hidden_unit() -> Case:
    found = case([nn.Conv2d(3, 4, 1), nets.SqueezeExcite(4, 3)], "mean", 4, 2, torch.randn(2, 3, 5, 5))
    with torch.no_grad():
        found.model.body[1].expand.weight[:, 1:] = 0
        found.model.body[1].reduce.weight[0] = 0
    return found


def two_gates_on_a_model_input() -> Case:
    """An input of fixed width meets what the gates compute from it."""
    found = case([nets.SqueezeExcite(3, 2), nets.SqueezeExcite(3, 2)], "mean", 3, 2, torch.randn(2, 3, 5, 5))
    with torch.no_grad():
        found.model.body[0].expand.weight[1] = 0
        found.model.body[1].expand.weight[1] = 0
        found.model.out.weight[:, 1] = 0
    return found


def unread_norm(norm: nn.Module) -> Case:
    """The head is constant, so nobody reads the norm; it has no weights to go, and runs on the narrowed stream."""
    model = nn.Sequential(nn.Embedding(6, 5), norm, nn.Linear(5, 2)).double()
    zero(model[2])
    return Case(model, torch.randint(6, (2, 3)), "once wrong")


def unread_layer_norm_without_weights() -> Case:
    return unread_norm(nn.LayerNorm(5, elementwise_affine=False))


def unread_rms_norm_without_weights() -> Case:
    return unread_norm(nn.RMSNorm(5, elementwise_affine=False))


def depthwise_carrier_in_a_body_called_twice() -> Case:
    """One constant channel stands for three under the filters, which are scaled for it once and not once a call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(x), self.body(x.tanh())

    model = Twice().double()
    with torch.no_grad():
        model.body[0].weight[3:] = 0
    return Case(model, torch.randn(2, 3, 5, 5).double(), "once wrong")


FOUND: list[Callable[[], Case]] = [
    constant_function_after_batch_norm,
    class_token_and_a_constant_head,
    token_mixing_and_a_constant_head,
    dead_residual_in_a_sequential,
    dead_residual_with_a_scale,
    gate_whose_hidden_unit_fills_a_width,
    gate_with_one_live_hidden_unit,
    two_gates_on_a_model_input,
    unread_layer_norm_without_weights,
    unread_rms_norm_without_weights,
    depthwise_carrier_in_a_body_called_twice,
]


@pytest.mark.parametrize("build", FOUND, ids=lambda build: build.__name__)
def test_once_wrong(build: Callable[[], Case]) -> None:
    attack(build())


def test_a_constant_head_keeps_the_number_of_tokens() -> None:
    found = class_token_and_a_constant_head()
    small = sr.squeeze(found.model, found.inputs).model
    assert small(found.inputs).shape == (2, 5, 2)


def test_a_dead_residual_keeps_its_shift() -> None:
    found = dead_residual_in_a_sequential()
    small, report = sr.squeeze(found.model, found.inputs)
    difference = small.body(found.inputs) - found.inputs
    assert report.params_after < report.params_before
    assert torch.allclose(difference, found.model.body[0].body[0].bias.expand(3, 3))


@pytest.mark.parametrize("seed", [101343, 101468])
def test_seeds_that_once_crashed(seed: int) -> None:
    """Labels of keys and values that do not lie side by side in memory."""
    attack_all(case_of(seed), seed)


@pytest.mark.parametrize("seed", [100907, 100908, 101075, 101761, 102369])
def test_seeds_whose_second_squeeze_once_found_more(seed: int) -> None:
    """Heads were tied in one way for the widths they had; at the widths that were left another way let more go."""
    attack_all(case_of(seed), seed)


@pytest.mark.parametrize("seed", [432, 4031])
def test_constants_that_only_dead_rows_read_once_had_no_bias_to_go_into(seed: int) -> None:
    """Cross-attention with weights of their own for q, k and v, and one bias for all three."""
    attack_all(case_of(seed), seed)


def test_the_copies_of_a_constant_were_once_taken_for_channels() -> None:
    """A norm over one channel, of a constant that is expanded over the tokens: how many there are is the input's."""
    attack_all(case_of(6775), 6775)
