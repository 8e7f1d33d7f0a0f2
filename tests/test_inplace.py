"""In place: the same modules, the same result as on a copy, nothing touched by an error, next to no memory."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from check import assert_same, assert_untouched, noisy
from hypothesis import HealthCheck, given, settings
from nets import Net, dead, rand, unread
from networks import Case
from networks.strategy import cases
from torch import Tensor, nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release import copies
from squeeze_release.follow import fitting
from squeeze_release.modules import IndexedLinear


def fc() -> nn.Sequential:
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))).double()
    dead(net[0], 1, 5)
    unread(net[2], 3)
    return net


def squeeze_in_place(net: nn.Module, x: Tensor | list[Tensor]) -> sr.Squeezed:
    return sr.squeeze(net, x, inplace=True, verify=False)


# ------------------------------------------------------------------------------------------------------- what comes out


def test_the_modules_stay_the_same_objects_and_so_do_the_parameters_that_stay_whole():
    net = fc()
    before, modules, last = copy.deepcopy(net), list(net.modules()), net[4].weight
    small, report = squeeze_in_place(net, rand(2, 4))
    assert small is net and list(net.modules()) == modules and net[4].weight is last
    assert net[0].out_features == 5 and net[0].weight.shape == (5, 4) and report.params_after < report.params_before
    assert_same(before, net, (rand(2, 4),), {})


@pytest.mark.parametrize("verify", [False, True])
def test_handles_of_hooks_stay_good(verify):
    net, widths = fc(), []
    handle = net[0].register_forward_hook(lambda module, args, output: widths.append(output.shape[-1]))
    sr.squeeze(net, rand(2, 4), inplace=True, verify=verify)
    widths.clear()
    net(rand(2, 4))
    handle.remove()
    net(rand(2, 4))
    assert widths == [5]


def test_tied_weights_stay_tied():
    net = Net(lambda self, i: self.head(self.table(i)), table=nn.Embedding(7, 6), head=nn.Linear(6, 7, bias=False))
    net.head.weight = net.table.weight
    with torch.no_grad():
        net.table.weight[:, 2] = 0
    squeeze_in_place(net.double(), torch.arange(5))
    assert net.head.weight is net.table.weight and net.head.weight.shape == (7, 5) and net.head.in_features == 5


def test_masks_are_baked_in_place_too():
    net = fc()
    mask = torch.ones_like(net[2].weight)
    mask[1] = 0
    prune.custom_from_mask(net[2], "weight", mask)
    before = copies.copy_model(net)
    squeeze_in_place(net, rand(2, 4))
    assert list(net[2]._parameters) == ["weight", "bias"] and not net[2]._forward_pre_hooks
    assert net[2].out_features == 5
    assert_same(before, net, (rand(2, 4),), {})


def test_masks_are_baked_even_where_nothing_goes():
    net = nn.Sequential(nn.Linear(4, 3))
    prune.random_unstructured(net[0], "weight", 1)
    squeeze_in_place(net, torch.randn(2, 4))
    assert dict(net.named_parameters()).keys() == {"0.weight", "0.bias"} and not net[0]._forward_pre_hooks


def test_a_model_that_is_one_layer():
    net = noisy(nn.Linear(5, 3))
    unread(net, 0, 4)
    assert squeeze_in_place(net, torch.randn(2, 5)).model is net
    assert type(net) is IndexedLinear and net.weight.shape == (3, 3) and net(torch.randn(2, 5)).shape == (2, 3)


def test_gradients_do_not_outlive_their_parameters():
    net = fc()
    net(rand(2, 4)).sum().backward()
    squeeze_in_place(net, rand(2, 4))
    assert all(p.grad is None for p in net.parameters())


def test_the_second_look_narrows_the_same_model():
    """The block is dead only once its channel is gone."""
    net = noisy(nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))])).double()
    dead(net[0], 0, 1, 2, 3)
    apart = sr.squeeze(net, rand(3, 4))
    together = squeeze_in_place(copy.deepcopy(net), rand(3, 4))
    assert together.report.params_after == apart.report.params_after < apart.report.params_before / 2
    assert_same(net, together.model, (rand(3, 4),), {})


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(cases())
def test_in_place_is_what_a_copy_would_be(case: Case) -> None:
    apart = sr.squeeze(case.model, case.inputs, verify=False)
    before = copy.deepcopy(case.model)
    together = squeeze_in_place(case.model, case.inputs)
    assert_equal(apart, together)
    for call in case.calls:
        assert_same(before, together.model, call, {})


def assert_equal(one: sr.Squeezed, other: sr.Squeezed) -> None:
    mine, yours = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)
    assert [type(m) for m in one.model.modules()] == [type(m) for m in other.model.modules()]
    assert (one.report.before, one.report.after) == (other.report.before, other.report.after)
    assert (one.report.layers, one.report.kept) == (other.report.layers, other.report.kept)


# --------------------------------------------------------------------------------------------------------------- errors


class Broken(Exception):
    pass


STEPS = ["copy_model", "bake_masks", "check_finite", "outline", "trace", "analyse", "feeds_training_branches", "fit"]


@pytest.mark.parametrize(
    ("verify", "step"),
    [
        *[(False, step) for step in ["borrow", *STEPS[1:]]],
        *[(True, step) for step in [*STEPS, "rewrite", "compare", "make_report"]],
    ],
)
def test_an_error_in_any_step_leaves_the_model_as_it_was(monkeypatch, step, verify):
    def breaks(*_: object, **__: object) -> None:
        raise Broken

    monkeypatch.setattr(import_module("squeeze_release.squeeze"), step, breaks)
    assert_left_alone(Broken, fc(), rand(2, 4), verify)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("step", ["rewrite", "check", "emptied", "hollow"])
def test_an_error_in_the_trial_leaves_the_model_as_it_was(monkeypatch, step, verify):
    def breaks(*_: object, **__: object) -> None:
        raise Broken

    monkeypatch.setattr(fitting, step, breaks)
    assert_left_alone(Broken, fc(), rand(2, 4), verify)


@pytest.mark.parametrize("verify", [False, True])
def test_bad_inputs_weights_and_masks_leave_the_model_as_it_was(verify):
    assert_left_alone(sr.InputError, fc(), rand(2, 5), verify)
    net = fc()
    with torch.no_grad():
        net[2].weight[0, 0] = torch.inf
    assert_left_alone(sr.WeightError, net, rand(2, 4), verify)
    net = fc()
    prune.custom_from_mask(net[2], "weight", torch.full_like(net[2].weight, 0.5))
    assert_left_alone(sr.MaskError, net, rand(2, 4), verify)


def assert_left_alone(error: type[Exception], net: nn.Module, x: Tensor, verify: bool) -> None:
    net.train()
    net[1].eval()
    before, modes = copy.deepcopy(net.state_dict()), {name: module.training for name, module in net.named_modules()}
    kept = [*net.modules(), *net.parameters()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
    with pytest.raises(error):
        sr.squeeze(net, x, inplace=True, verify=verify)
    assert_untouched(net, before, modes)
    assert all(one is other for one, other in zip(kept, [*net.modules(), *net.parameters()], strict=True))
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_forward_leaves_on_its_modules_is_not_left_on_the_users(inplace, verify):
    """The trace runs with fake tensors: one of them on the user's module would break it."""

    def code(self: nn.Module, x: Tensor) -> Tensor:
        self.last = self.one(x)
        self.calls += 1
        return self.two(F.relu(self.last))

    net = Net(code, one=noisy(nn.Linear(4, 8)), two=nn.Linear(8, 3), calls=0, last=None)
    dead(net.one, 3)
    small = sr.squeeze(net, torch.randn(2, 4), inplace=inplace, verify=verify).model
    assert small.one.out_features == 7 and small.calls == 0 and small.last is None


def test_running_statistics_do_not_move():
    """A branch that runs in training only is looked for by a run in training mode."""

    def code(self: nn.Module, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = F.relu(self.norm(self.stem(x)))
        return (self.head(h), self.aux(h)) if self.training else self.head(h)

    net = Net(code, stem=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 3), aux=nn.Linear(8, 3))
    before = copy.deepcopy(noisy(net.double()).state_dict())
    _, report = squeeze_in_place(net, rand(5, 4))
    assert report.params_before == report.params_after
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


# --------------------------------------------------------------------------------------------------------------- copies


def test_a_borrowed_model_shares_parameters_and_nothing_else():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    other = copies.borrow(net)
    for mine, yours in zip(net.parameters(), other.parameters(), strict=True):
        assert mine is not yours and mine.data_ptr() == yours.data_ptr() and mine.requires_grad == yours.requires_grad
    assert not {t.data_ptr() for t in net.buffers()} & {t.data_ptr() for t in other.buffers()}
    assert not set(net.modules()) & set(other.modules())


def test_a_hollow_model_has_the_shapes_and_no_weights():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    before = copy.deepcopy(net.state_dict())
    other = copies.hollow(net)
    assert other[0].weight.untyped_storage().nbytes() == 4 and other[0].weight.shape == (8, 3, 3, 3)
    assert torch.equal(other[1].weight, net[1].weight) and other(torch.randn(1, 3, 5, 5)).shape == (1, 8, 3, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


class Trials:
    """Counts the trials of a squeeze, hollow and real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hollow = self.real = 0
        check = fitting.check

        def counted(ctx, live, plan, model, calls):
            weights = [p for p in model.parameters() if p.dim() > 1]
            empty = all(w.untyped_storage().nbytes() == w.element_size() for w in weights)
            self.hollow, self.real = self.hollow + empty, self.real + (not empty)
            return check(ctx, live, plan, model, calls)

        monkeypatch.setattr(fitting, "check", counted)


def test_a_trial_holds_no_weights(monkeypatch):
    trials = Trials(monkeypatch)
    sr.squeeze(fc(), rand(2, 4))
    assert (trials.hollow, trials.real) == (1, 0)


def test_where_a_hollow_trial_gives_trouble_a_real_one_decides(monkeypatch):
    def code(self: nn.Module, x: Tensor) -> Tensor:
        assert self.one.weight.is_contiguous()
        return self.two(F.relu(F.linear(x, self.one.weight, self.one.bias)))

    net = Net(code, one=noisy(nn.Linear(4, 8)), two=nn.Linear(8, 3)).double()
    dead(net.one, 3)
    trials = Trials(monkeypatch)
    small = sr.squeeze(net, rand(2, 4)).model
    assert small.one.weight.shape == (7, 4) and (trials.hollow, trials.real) == (1, 1)


def test_where_both_give_trouble_the_channels_stay(monkeypatch):
    net = Net(lambda self, x: self.two(F.relu(self.one(x)).reshape(-1, 8)), one=nn.Linear(4, 8), two=nn.Linear(8, 3))
    dead(noisy(net.double()).one, 3)
    trials = Trials(monkeypatch)
    small, report = sr.squeeze(net, rand(2, 4))
    assert small.one.weight.shape == (8, 4) and trials.hollow == trials.real > 0
    assert "its code does not follow the new widths" in report.kept[0].reason


def test_the_number_of_trials_does_not_grow_with_depth(monkeypatch):
    def count(depth: int) -> int:
        net = nn.Sequential(
            *[Net(lambda self, x: x + self.b(self.a(x).reshape(-1, 8)), a=nn.Linear(6, 8), b=nn.Linear(8, 6))]
            + [Fixed() for _ in range(depth)]
        )
        for block in net:
            dead(noisy(block).a, 1)
        trials = Trials(monkeypatch)
        _, report = sr.squeeze(net, torch.randn(2, 6), verify=False)
        assert report.params_before == report.params_after and len(report.kept) == depth + 1
        return trials.hollow

    assert count(5) == count(10)


class Fixed(nn.Module):
    """Code that does not follow, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)).reshape(-1, 8))


# --------------------------------------------------------------------------------------------------------------- memory

MEASURE = """
import sys, torch
from torch import nn
sys.path[:0] = sys.argv[1:3]
from llama_scale import Peak
import squeeze_release as sr

torch.set_num_threads(1)

def build(width, depth):
    net = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
    with torch.no_grad():
        for layer in net[:-2:2]:
            layer.weight[: width // 4] = 0
    return net

sr.squeeze(build(8, 3), torch.randn(1, 8))
net = build(2048, 12)
size = sum(p.numel() * p.element_size() for p in net.parameters())
with Peak() as peak:
    sr.squeeze(net, torch.randn(1, 2048), inplace=sys.argv[3] == "inplace", verify=False)
print(peak.above / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize(("how", "least", "most"), [("inplace", 0.0, 0.3), ("copy", 0.9, 2.5)])
def test_memory(how, least, most):
    """Twelve layers of 16 MB; the copy is there to show that the measurement sees one."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", MEASURE, str(root / "src"), str(root / "benchmarks"), how]
    # What is freed goes back to the system at once; else malloc keeps some of it, now more, now less.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    assert least <= float(done.stdout) <= most
