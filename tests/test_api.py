"""squeeze(): its arguments, what it preserves, and what the report says."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from check import assert_same, assert_untouched, check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

import squeeze_release as sr
from squeeze_release.modules import IndexedLinear
from squeeze_release.rules.affine import Affine


def fc() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    noisy(net)
    dead(net[0], 1, 2)
    dead(net[3], 0)
    return net


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule with a bug: constants that go are not folded."""
    monkeypatch.setattr(Affine, "_fold", lambda *_: None)


# ----------------------------------------------------------------------------------------------------------- arguments


def test_not_inplace_is_the_default():
    net = fc()
    small, report = sr.squeeze(net, torch.randn(2, 4))
    assert small is not net and net[0].out_features == 8 and small[0].out_features == 6
    assert report.params_after < report.params_before == sum(p.numel() for p in net.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_the_results_share_no_memory_with_the_model():
    net = fc()
    small = sr.squeeze(net, torch.randn(2, 4)).model
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for tensor in [*small.parameters(), *small.buffers()]:
            tensor.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_inplace_changes_the_model_itself():
    net, x = fc().eval(), torch.randn(2, 4)
    expected = net(x)
    result = sr.squeeze(net, x, inplace=True)
    assert result.model is net and net[0].out_features == 6
    assert torch.allclose(net(x), expected, atol=1e-6)
    assert sum(p.numel() for p in net.parameters()) == result.report.params_after


@pytest.mark.parametrize("inplace", [False, True])
def test_a_wrong_rule_is_caught_and_the_model_is_untouched(monkeypatch, inplace):
    wrong(monkeypatch)
    net = fc().double()
    before, modes = copy.deepcopy(net.state_dict()), {name: m.training for name, m in net.named_modules()}
    ids = [id(p) for p in net.parameters()]
    with pytest.raises(sr.VerificationError) as caught:
        sr.squeeze(net, rand(2, 4), inplace=inplace)
    assert_untouched(net, before, modes)
    assert ids == [id(p) for p in net.parameters()] and type(net) is nn.Sequential
    what, where, consequence, remedy = str(caught.value).splitlines()
    assert what.startswith("the rewritten network differs from the original by ") and "allowed are 1.0e-10" in what
    assert where.startswith("  where:       output; variant: ")
    assert consequence == "  consequence: no network is returned; your model is untouched"
    assert remedy.startswith("  remedy:      a rule is wrong") and "keep=" in remedy


def test_without_verification_a_wrong_rule_is_not_caught(monkeypatch):
    wrong(monkeypatch)
    small, report = sr.squeeze(fc(), torch.randn(2, 4), verify=False)
    assert report.max_error is None and report.verification is None and small[0].out_features == 6
    assert "not verified" in str(report)


@pytest.mark.parametrize("keep", [["0"], ("0",), {"0"}, "0"], ids=str)
def test_keep_one_module(keep):
    check(fc(), rand(2, 4), keep=keep, golden={"0.out_features": 8, "1.num_features": 8, "3.out_features": 5})


def test_keep_by_a_plain_string_with_several_letters():
    net = noisy(Net(lambda s, x: s.last(torch.tanh(s.first(x))), first=nn.Linear(4, 6), last=nn.Linear(6, 2)))
    dead(net.first, 1)
    check(net, rand(2, 4), keep="first", golden={"first.out_features": 6})


def test_keep_names_a_module_whose_weight_is_tied_to_another():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.mid(s.table(x)))),
        table=nn.Embedding(7, 6),
        mid=nn.Linear(6, 6),
        out=nn.Linear(6, 7),
    )
    net.out.weight = net.table.weight
    with torch.no_grad():
        net.table.weight[:, 2] = 0
    dead(net.mid, 2)
    check(net, torch.tensor([[0, 1, 5]]), keep=["out"], golden={"out.in_features": 6, "table.embedding_dim": 6})


def test_keep_a_container_keeps_all_in_it():
    net = noisy(nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))
    dead(net[0][0], 1)
    dead(net[1], 1)
    squeezed = check(net, rand(2, 4), keep=["0"], golden={"0.0.out_features": 6, "1.out_features": 4})
    assert "keep=" in reasons(squeezed.report)


def test_keep_a_first_layer_keeps_its_inputs():
    net = fc()
    unread(net[0], 3)
    check(net, rand(2, 4), keep=["0"], golden={"0": nn.Linear, "0.weight": (8, 4)})


def test_keep_the_whole_model():
    check(fc(), rand(2, 4), keep=[""], golden={"0.out_features": 8, "3.out_features": 6})


@pytest.mark.parametrize("rules", ["A", "AB", "paper", "all"])
def test_every_rule_set_folds_and_drops(rules):
    net = fc()
    unread(net[0], 3)
    check(net, rand(2, 4), rules=rules, golden={"0.weight": (6, 3), "0": IndexedLinear, "3.weight": (5, 6)})


def test_inputs_may_be_a_tensor_a_tuple_or_a_list_of_calls():
    x = torch.randn(2, 4)
    for inputs in (x, (x,), [x], [(x,), torch.randn(5, 4)]):
        assert sr.squeeze(fc(), inputs).model[0].out_features == 6


def test_returns_a_named_tuple():
    result = sr.squeeze(fc(), torch.randn(2, 4))
    assert isinstance(result, sr.Squeezed) and result._fields == ("model", "report")


# ------------------------------------------------------------------------------------------------------------ preserved


def test_hooks_stay_and_fire():
    seen = []
    net = fc().eval()
    net[3].register_forward_hook(lambda module, args, out: seen.append(("out", tuple(out.shape))))
    net[0].register_forward_pre_hook(lambda module, args: seen.append(("in", tuple(args[0].shape))))
    unread(net[0], 0)  # becomes an IndexedLinear, which takes the hook with it
    small = sr.squeeze(net, torch.randn(2, 4)).model
    seen.clear()
    small(torch.randn(2, 4))
    assert seen == [("in", (2, 4)), ("out", (2, 5))]


def test_hook_that_changes_the_output_is_part_of_the_function():
    net = fc()
    net[0].register_forward_hook(lambda module, args, out: out * 2 + 1)
    check(net, rand(2, 4), golden={"0.out_features": 6})


def test_hooks_on_a_dead_block_are_exact():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return x + self.b(torch.relu(self.a(x)))

    net = noisy(nn.Sequential(nn.Linear(4, 6), Block(), nn.Linear(6, 2)))
    dead(net[1].b, *range(6))
    net[1].register_forward_hook(lambda module, args, out: out * 2)
    net[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check(net, rand(2, 4))


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_flags(training):
    net = fc().train(training)
    net[1].train(not training)
    small = check(net, rand(2, 4)).model
    assert small.training is training and small[1].training is not training and small[3].training is training


def test_frozen_parameters_stay_frozen():
    net = fc()
    net[0].requires_grad_(False)
    net[5] = nn.Linear(6, 3, bias=False)
    net[5].weight.requires_grad_(False)
    small = sr.squeeze(net, torch.randn(2, 4)).model
    assert [p.requires_grad for p in small[0].parameters()] == [False, False]
    assert all(p.requires_grad for p in small[3].parameters())
    assert not small[5].bias.requires_grad and all(p.is_leaf for p in small.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype):
    net = noisy(
        nn.Sequential(
            nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)
        )
    ).to(dtype)
    dead(net[0], 1)
    unread(net[3], 1)
    dead(net[3], 0)
    small, report = sr.squeeze(net, torch.randn(2, 4, dtype=dtype))
    assert small[0].out_features == 7 and small[3].out_features == 5
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert small[1].mean.dtype == torch.float64 and report.max_error <= 1e-10
    assert small(torch.randn(5, 4, dtype=dtype)).dtype == dtype


def test_mixed_dtypes():
    net = Net(lambda s, x: s.out(torch.tanh(s.lin(x)).double()), lin=nn.Linear(4, 6), out=nn.Linear(6, 2).double())
    dead(net.lin, 1)
    small = sr.squeeze(net, torch.randn(2, 4)).model
    assert (
        small.lin.weight.dtype == torch.float32
        and small.out.weight.dtype == torch.float64
        and small.lin.out_features == 5
    )


def test_channels_last_stays_channels_last():
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)))
    dead(net[0], 1, 2)
    net = net.to(memory_format=torch.channels_last)
    small = sr.squeeze(net, torch.randn(1, 3, 9, 9)).model
    assert small[2].in_channels == 6
    assert all(small[i].weight.is_contiguous(memory_format=torch.channels_last) for i in (0, 2, 4))


def test_contiguous_stays_contiguous_even_where_a_width_is_one():
    net = noisy(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    dead(net[0], 1, 2)
    small = sr.squeeze(net, torch.randn(1, 1, 9, 9)).model
    assert all(p.is_contiguous() for p in small.parameters())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
@pytest.mark.parametrize("inplace", [False, True])
def test_wrapped_models_are_unwrapped(wrap, inplace):
    net = fc().eval()
    wrapped = wrap(net)
    x = torch.randn(2, 4, device=next(net.parameters()).device)  # DataParallel moves it to a GPU if there is one
    small = sr.squeeze(wrapped, x, inplace=inplace).model
    assert type(small) is nn.Sequential and small[0].out_features == 6 and (small is net) is inplace


def test_attributes_of_the_users_own_survive():
    net = fc()
    net.classes, net.history = ["a", "b", "c"], {"loss": 0.1}
    small = sr.squeeze(net, torch.randn(2, 4)).model
    assert small.classes == ["a", "b", "c"] and small.history == {"loss": 0.1}


def test_a_model_that_is_one_layer():
    net = noisy(nn.Linear(5, 3))
    unread(net, 0, 4)
    small = check(net, rand(2, 5), golden={"weight": (3, 3), "index": (3,)}).model
    assert type(small) is IndexedLinear
    sr.squeeze(net, rand(2, 5), inplace=True)
    assert type(net) is IndexedLinear and net(rand(2, 5)).shape == (2, 3)


def test_a_model_without_parameters():
    small, report = sr.squeeze(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.randn(2, 4))
    assert report.params_before == report.params_after == 0 and small(torch.randn(2, 4)).shape == (2, 4)


def test_the_result_trains_exports_and_loads():
    small = sr.squeeze(fc(), torch.randn(2, 4)).model
    small.train()(torch.randn(4, 4)).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    torch.export.export(small.eval(), (torch.randn(2, 4),))
    again = copy.deepcopy(small)
    again.load_state_dict(small.state_dict())
    assert_same(small, again, (torch.randn(2, 4),), {})


def test_squeeze_train_prune_squeeze():
    net = noisy(
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    ).double()
    dead(net[0], 1)
    unread(net[3], 1)
    small = check(net, rand(2, 4)).model
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    small(rand(8, 4)).square().sum().backward()
    optimizer.step()
    dead(small[0], 0)
    unread(small[3], 0)
    dead(small[3], 2)
    twice = check(small, rand(2, 4), golden={"0.out_features": 6, "3.weight": (5, 6)})
    assert twice.model[1].removed == 2


# --------------------------------------------------------------------------------------------------------------- report


def test_report_counts():
    net = fc()
    alive = sum(int(p.count_nonzero()) for p in net.parameters())
    weights = [net[i].weight for i in (0, 3, 5)]
    small, report = sr.squeeze(net, torch.randn(2, 4))
    assert report.mask_alive == alive
    assert report.weights_before == sum(w.numel() for w in weights)
    assert report.weights_mask_alive == sum(int(w.count_nonzero()) for w in weights)
    assert report.weights_after == sum(small[i].weight.numel() for i in (0, 3, 5))
    assert report.params_after == sum(p.numel() for p in small.parameters())
    assert report.max_error is not None and report.max_error <= 1e-10 and report.seconds > 0


def test_report_prints_a_table():
    net = fc()
    text = str(sr.squeeze(net, torch.randn(2, 4)).report)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "layer" in rows["layer"] and "width" in rows["layer"] and "parameters" in rows["layer"]
    assert rows["0"].split() == ["0", "4", "->", "8", "->", "4", "->", "6", "40", "->", "30"]
    assert rows["3"].split() == ["3", "8", "->", "6", "->", "6", "->", "5", "54", "->", "35"]
    assert rows["5"].split() == ["5", "6", "->", "3", "->", "5", "->", "3", "21", "->", "18"]
    assert rows["all"].split()[:5] == ["all", "parameters", "131", "115", "95"]
    assert rows["prunable"].split()[:5] == ["prunable", "weights", "98", "82", "69"]
    assert "max error" in text and "float64" in text


def test_report_leaves_no_file_open():
    report = sr.squeeze(fc(), torch.randn(2, 4)).report
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(report) == str(report)


def test_report_names_the_reader_that_refused():
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(5, 2, 1)))
    dead(net[0], 1, bias=0.5)
    report = sr.squeeze(net, torch.randn(1, 3, 8, 8)).report
    (row,) = report.kept
    assert (row.name, row.what, row.count) == ("0", "outputs", 1)
    assert row.reason.startswith("1 (aten.conv2d)") and "zero padding" in row.reason
    assert "looked dead, but stayed" in str(report) and "zero padding" in str(report)


def test_report_of_a_stand_in_counts_what_was_inside():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)))
    net = Net(lambda s, x: s.out((y := s.stem(x)) + s.branch(y)), stem=net[0], branch=net[1], out=net[2])
    dead(net.branch[0], *range(6))
    report = sr.squeeze(net, torch.randn(2, 4)).report
    (row,) = [layer for layer in report.layers if layer.name.startswith("branch")]
    assert row.name == "branch" and row.params_before == 42 and row.params_after == 6


def test_a_second_squeeze_removes_nothing_and_says_so():
    small = sr.squeeze(fc(), torch.randn(2, 4)).model
    again, report = sr.squeeze(small, torch.randn(2, 4))
    assert report.params_after == report.params_before and report.layers == ()
    assert "nothing could be removed" in str(report)
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in small.named_parameters()
    }
