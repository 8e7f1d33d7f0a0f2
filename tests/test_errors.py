"""Every error says what, where, consequence and remedy, and leaves the model as it was."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from check import noisy
from nets import Net, dead
from torch import nn
from torch.nn.utils import parametrize, prune

import squeeze_release as sr


def net() -> nn.Sequential:
    model = noisy(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    dead(model[0], 1)
    return model  # type: ignore[return-value]


def refusal(
    kind: type[sr.SqueezeError], model: nn.Module, inputs: object, kwargs: dict | None = None, **options: object
) -> list[str]:
    """The four lines of the message; the model must be as it was."""
    before = copy.deepcopy({name: t.detach() for name, t in model.state_dict().items()})
    modes = [module.training for module in model.modules()]
    with pytest.raises(sr.SqueezeError) as caught:
        sr.squeeze(model, inputs, kwargs, **options)  # type: ignore[arg-type]
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    after = model.state_dict()
    assert (
        all(torch.equal(after[name], before[name]) or before[name].isnan().any() for name in before)
        and after.keys() == before.keys()
    )
    assert [module.training for module in model.modules()] == modes
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in model.modules()
        if not hasattr(module, "weight_orig")
    )
    lines = str(caught.value).splitlines()
    assert len(lines) == 4, str(caught.value)
    heads = ["", "  where:       ", "  consequence: ", "  remedy:      "]
    assert all(line.startswith(head) and len(line) > len(head) for line, head in zip(lines, heads, strict=True))
    error = caught.value
    assert lines == [error.what, heads[1] + error.where, heads[2] + error.consequence, heads[3] + error.remedy]
    return [line[len(head) :] for line, head in zip(lines, heads, strict=True)]


# --------------------------------------------------------------------------------------------------------------- inputs


def test_inputs_of_the_wrong_width():
    what, where, consequence, remedy = refusal(sr.InputError, net(), torch.randn(2, 5))
    assert what == (
        "the model cannot run on the example inputs: RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(2x5 and 4x6)"
    )
    assert where == "Sequential(float32[2, 5]), in 0"
    assert consequence == "nothing was changed"
    assert remedy == "pass inputs with which model(*example_inputs, **kwargs) works"


def test_inputs_of_the_wrong_dtype():
    what, where, *_ = refusal(sr.InputError, net(), torch.randn(2, 4, dtype=torch.float64))
    assert "dtype" in what and where == "Sequential(float64[2, 4]), in 0"


def test_a_missing_argument():
    model = Net(lambda s, x, y: s.lin(x) + y, lin=nn.Linear(4, 3))
    what, where, *_ = refusal(sr.InputError, model, torch.randn(2, 4))
    assert "TypeError" in what and "'y'" in what and where == "Net(float32[2, 4]), in its own forward"


def test_an_unknown_keyword():
    what, where, *_ = refusal(sr.InputError, net(), torch.randn(2, 4), {"mask": torch.ones(2)})
    assert "mask" in what and "mask=float32[2]" in where


def test_a_failure_deep_inside_names_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(5, 2)))
    _, where, *_ = refusal(sr.InputError, model, torch.randn(2, 4))
    assert where == "Sequential(float32[2, 4]), in 1.1"


def test_an_error_with_several_lines_becomes_one():
    def run(s, x):
        raise ValueError("first line\nsecond line")

    what, *_ = refusal(sr.InputError, Net(run, lin=nn.Linear(2, 2)), torch.randn(2, 2))
    assert what == "the model cannot run on the example inputs: ValueError: first line"


def test_an_error_without_words():
    def run(s, x):
        raise AssertionError

    what, *_ = refusal(sr.InputError, Net(run, lin=nn.Linear(2, 2)), torch.randn(2, 2))
    assert "AssertionError" in what


def test_the_second_call_of_a_list_does_not_fit():
    _, where, *_ = refusal(sr.InputError, net(), [torch.randn(2, 4), torch.randn(2, 7)])
    assert "[2, 7]" in where


def test_an_empty_list():
    what, where, consequence, remedy = refusal(sr.InputError, net(), [])
    assert what == "example_inputs is an empty list"
    assert where == "squeeze(model, example_inputs)"
    assert consequence == "there is nothing to trace the model with"
    assert remedy == "pass a tensor, a tuple of arguments, or a list of such calls"


def test_no_inputs_at_all():
    refusal(sr.InputError, net(), ())


@pytest.mark.parametrize(
    "inputs", [None, "an image", 3, {"x": torch.randn(2, 4)}], ids=["none", "text", "number", "dict"]
)
def test_inputs_that_are_no_tensors(inputs):
    refusal(sr.InputError, net(), inputs)


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize("rules", ["B", "", "ALL", "everything", None])
def test_unknown_rules(rules):
    what, where, consequence, remedy = refusal(sr.InputError, net(), torch.randn(2, 4), rules=rules)
    assert what == f"rules={rules!r} is not a known value"
    assert where == "squeeze(..., rules=)"
    assert consequence == "nothing was changed"
    assert remedy == "use one of 'A', 'AB', 'paper', 'all'"


@pytest.mark.parametrize("keep", [["nope"], ("0", "0.weight"), "nope", ["0.nope"]], ids=str)
def test_keep_that_names_no_module(keep):
    what, where, consequence, remedy = refusal(sr.InputError, net(), torch.randn(2, 4), keep=keep)
    assert what in (
        "keep names no module: 'nope'",
        "keep names no module: '0.weight'",
        "keep names no module: '0.nope'",
    )
    assert where == "Sequential"
    assert consequence == "nothing was changed"
    assert remedy == "use the dotted names of model.named_modules()"


def test_a_state_dict_is_no_model():
    with pytest.raises(sr.ModelError) as caught:
        sr.squeeze(net().state_dict(), torch.randn(2, 4))  # type: ignore[arg-type]
    assert "expected a torch.nn.Module, got collections.OrderedDict" in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- export


def branch(s, x):
    return s.a(x) if x.sum() > 0 else s.b(x)


def test_control_flow_that_depends_on_data():
    what, where, consequence, remedy = refusal(
        sr.ExportError, Net(branch, a=nn.Linear(4, 2), b=nn.Linear(4, 2)), torch.randn(2, 4)
    )
    assert what.startswith("torch.export cannot trace this model: ")
    assert where == "Net"
    assert consequence == "nothing was changed; without a trace no channel can be shown to be removable"
    assert "torch.export.export(model.eval(), args, strict=False)" in remedy and "data-dependent" in remedy


def test_numpy_inside():
    def run(s, x):
        return s.a(torch.from_numpy(s.b(x).detach().numpy()))

    refusal(sr.ExportError, Net(run, a=nn.Linear(4, 2), b=nn.Linear(4, 4)), torch.randn(2, 4))


def test_a_model_that_cannot_be_copied():
    model = net()
    model.lock = threading.Lock()
    what, where, consequence, remedy = refusal(sr.ModelError, model, torch.randn(2, 4))
    assert what.startswith("the model cannot be copied: TypeError") and "lock" in what
    assert where == "Sequential" and "locks" in remedy and consequence


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(bad):
    model = net()
    with torch.no_grad():
        model[0].weight[2, 1] = bad
        model[2].bias[:] = bad
    what, where, consequence, remedy = refusal(sr.WeightError, model, torch.randn(2, 4))
    assert what == "3 entries are NaN or infinite"
    assert where == "0.weight (1 entries), 2.bias (2 entries)"
    assert consequence == "there is no function to preserve; the model is left as it was"
    assert remedy == "go back to a checkpoint from before the training diverged"


def test_running_statistics_that_are_not_finite():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model[1].running_var[3] = torch.inf
    _, where, *_ = refusal(sr.WeightError, model, torch.randn(2, 4))
    assert where == "1.running_var (1 entries)"


def test_nan_that_a_mask_hides_is_no_error():
    """A masked weight is 0, whatever stands under the mask."""
    model = net()
    prune.custom_from_mask(model[0], "weight", torch.ones(6, 4))
    with torch.no_grad():
        model[0].weight_mask[2] = 0
        model[0].weight_orig[2] = 1e30
    assert sr.squeeze(model, torch.randn(2, 4)).model[0].out_features == 4


def test_infinite_buffers_are_allowed():
    model = Net(lambda s, x: (s.lin(x) + s.mask).softmax(-1), lin=nn.Linear(4, 6))
    model.register_buffer("mask", torch.zeros(6).masked_fill(torch.arange(6) > 3, -torch.inf))
    sr.squeeze(model, torch.randn(2, 4))


# ---------------------------------------------------------------------------------------------------------------- masks


def test_a_mask_of_the_wrong_shape():
    model = net()
    prune.identity(model[0], "weight")
    model[0].weight_mask = torch.ones(5, 4)
    what, where, consequence, remedy = refusal(sr.MaskError, model, torch.randn(2, 4))
    assert what == "mask of shape (5, 4) on a weight of shape (6, 4)"
    assert where == "0.weight" and consequence and remedy


def test_a_mask_of_other_numbers():
    model = net()
    prune.identity(model[0], "weight")
    model[0].weight_mask[2] = 0.5
    what, where, *_ = refusal(sr.MaskError, model, torch.randn(2, 4))
    assert what == "mask with values other than 0 and 1" and where == "0.weight"


def test_a_parametrization_that_is_no_mask():
    class Twice(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 2 * w

    model = net()
    parametrize.register_parametrization(model[0], "weight", Twice())
    _, where, _, remedy = refusal(sr.ModelError, model, torch.randn(2, 4))
    assert "0" in where and "remove_parametrizations" in remedy


# ----------------------------------------------------------------------------------------------------------- randomness


def test_a_model_that_is_random_in_eval_mode():
    model = Net(lambda s, x: s.out(torch.tanh(s.lin(x)) + torch.rand(6)), lin=nn.Linear(4, 6), out=nn.Linear(6, 2))
    dead(model.lin, 1)
    try:
        small = sr.squeeze(model, torch.randn(2, 4)).model
    except sr.VerificationError as error:
        assert "not deterministic" in str(error) and "verify=False" in str(error)
    else:
        assert small.lin.out_features == 6  # the random numbers have a fixed width


def test_all_errors_have_one_base():
    for kind in (sr.InputError, sr.ModelError, sr.ExportError, sr.WeightError, sr.MaskError, sr.VerificationError):
        error = kind("what", where="where", consequence="consequence", remedy="remedy")
        assert isinstance(error, sr.SqueezeError)
        assert str(error) == "what\n  where:       where\n  consequence: consequence\n  remedy:      remedy"
