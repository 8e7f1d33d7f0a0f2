"""masks: copies that work on pruned models, masks that become exact zeros, counts."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from squeeze_release.errors import MaskError, ModelError, WeightError
from squeeze_release.masks import Counts, InFloat64, bake_masks, check_finite, copy_model, count, prunable, to_float64


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


def baked(model: nn.Module) -> nn.Module:
    replica = copy_model(model)
    bake_masks(replica)
    return replica


def mask_like(weight: torch.Tensor) -> torch.Tensor:
    return (torch.arange(weight.numel()).view(weight.shape) % 3 != 0).to(weight.dtype)


class Mask(nn.Module):
    """A user's own mask parametrization."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


class TestCopy:
    def test_deepcopy_alone_fails_on_a_pruned_model(self):
        model = net()
        prune.l1_unstructured(model[3], "weight", 0.5)
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(model)

    def test_pruned_model_computes_the_same_and_shares_nothing(self):
        model = net()
        prune.l1_unstructured(model[3], "weight", 0.5)
        prune.random_unstructured(model[0], "bias", 0.5)
        replica = copy_model(model.eval())
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(model(x), replica(x))
        with torch.no_grad():
            replica[3].weight_orig.zero_()
        assert model[3].weight_orig.any() and not replica(x)[:, :1].sub(replica[3].bias[0]).any()

    def test_graphs_in_lists_and_in_hook_objects(self):
        class Keeps:
            def __call__(self, module, args, output):
                self.last = output

        model = net()
        hook = Keeps()
        model[3].register_forward_hook(hook)
        model[3].seen = [model(torch.randn(2, 3, 4, 4))]
        replica = copy_model(model)
        assert not replica[3].seen[0].requires_grad and torch.equal(replica[3].seen[0], model[3].seen[0])
        (copied_hook,) = replica[3]._forward_hooks.values()
        assert copied_hook is not hook and torch.equal(copied_hook.last, hook.last)
        assert hook.last.requires_grad  # the original keeps its graph

    def test_flags_ties_formats_and_gradients(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))
        model[1].weight = model[0].weight
        model[2].to(memory_format=torch.channels_last).weight.requires_grad_(False)
        model[3].eval()
        model.register_buffer("trained", torch.ones(1, 4, requires_grad=True))
        model[0](model.trained).sum().backward()
        replica = copy_model(model)
        assert [m.training for m in replica] == [True, True, True, False] and replica.training
        assert replica[1].weight is replica[0].weight and replica[0].weight is not model[0].weight
        assert replica[2].weight.stride() == model[2].weight.stride() and not replica[2].weight.requires_grad
        assert all(t.grad is None for t in [*replica.parameters(), replica.trained])
        assert model[0].weight.grad is not None and model.trained.grad is not None

    def test_hooks_bound_to_the_model_follow_the_copy(self):
        class Counting(nn.Linear):
            calls = 0

            def note(self, module, args):
                self.calls += 1

        model = Counting(2, 2)
        model.register_forward_pre_hook(model.note)
        replica = copy_model(model)
        replica(torch.zeros(1, 2))
        assert (model.calls, replica.calls) == (0, 1)

    def test_what_cannot_be_copied_is_said(self):
        model = net()
        model.lock = threading.Lock()
        with pytest.raises(ModelError, match="cannot be copied") as caught:
            copy_model(model)
        assert "lock" in caught.value.what


class TestBakePrune:
    @pytest.mark.parametrize("name", ["weight", "bias"])
    def test_zeros_dtype_order_and_hooks(self, name):
        torch.manual_seed(1)
        plain = net().to(torch.float16)
        plain[3].weight.requires_grad_(False)
        model = copy_model(plain)
        mask = mask_like(getattr(model[3], name))
        prune.custom_from_mask(model[3], name, mask)
        bake_masks(model)
        value = getattr(model[3], name)
        assert isinstance(value, nn.Parameter) and value.dtype is torch.float16
        assert value.requires_grad == (name == "bias")
        assert torch.equal(value, getattr(plain[3], name) * mask) and not value.signbit()[value == 0].any()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert not model[3]._forward_pre_hooks and type(model[3]) is nn.Linear

    def test_iterated_pruning_of_several_tensors(self):
        model = net()
        for _ in range(3):
            prune.l1_unstructured(model[3], "weight", 0.3)
            prune.l1_unstructured(model[3], "bias", 1)
            prune.ln_structured(model[0], "weight", 1, n=2, dim=0)
        expected = {
            name: getattr(model[i], n).detach() for name, i, n in [("3.weight", 3, "weight"), ("3.bias", 3, "bias")]
        }
        result = baked(model.eval())
        assert list(result.state_dict()) == list(net().state_dict())
        assert all(torch.equal(result.state_dict()[name], value) for name, value in expected.items())
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(model(x), result(x))

    def test_the_mask_counts_not_the_stale_product(self):
        model = nn.Linear(4, 4)
        prune.l1_unstructured(model, "weight", 0.5)
        with torch.no_grad():
            model.weight_orig.fill_(2.0)  # an optimizer step: model.weight is older until the next forward
        assert set(baked(model).weight.flatten().tolist()) == {0.0, 2.0}

    def test_lstm_keeps_its_second_list_of_weights(self):
        model = nn.LSTM(3, 4, batch_first=True)
        names = list(model.state_dict())
        x = torch.randn(2, 5, 3)
        for name in ("weight_ih_l0", "bias_hh_l0"):
            prune.l1_unstructured(model, name, 0.5)
        result = baked(model)
        assert list(result.state_dict()) == names
        assert result._flat_weights[0] is result.weight_ih_l0
        assert torch.equal(model(x)[0], result(x)[0])

    def test_attention_projection(self):
        model = nn.MultiheadAttention(8, 2)
        names = list(model.state_dict())
        prune.l1_unstructured(model, "in_proj_weight", 0.5)
        assert list(baked(model).state_dict()) == names

    def test_memory_format(self):
        model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        stride = model.weight.stride()
        prune.custom_from_mask(model, "weight", mask_like(model.weight.detach()).contiguous())
        assert baked(model).weight.stride() == stride

    @pytest.mark.parametrize("same", [True, False])
    def test_ties(self, same):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        mask = mask_like(model[0].weight)
        prune.custom_from_mask(model[0], "weight", mask)
        prune.custom_from_mask(model[1], "weight", mask if same else 1 - mask)
        result = baked(model)
        assert (result[0].weight is result[1].weight) == same
        x = torch.randn(2, 4)
        assert torch.equal(model(x), result(x))

    def test_a_tied_weight_masked_at_one_end_leaves_the_other_end_alone(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        full = model[1].weight.detach().clone()
        prune.custom_from_mask(model[0], "weight", mask_like(full))
        result = baked(model)
        assert torch.equal(result[1].weight, full) and torch.equal(result[0].weight, full * mask_like(full))

    def test_broadcasting_mask_and_bool_mask(self):
        model = nn.Linear(4, 3)
        prune.custom_from_mask(model, "weight", torch.ones(3, 4))
        model.weight_mask = torch.tensor([[True], [False], [True]])
        assert baked(model).weight.any(1).tolist() == [True, False, True]

    @pytest.mark.parametrize(
        ("mask", "what"),
        [(torch.ones(4, 3), "shape"), (torch.ones(2, 3, 4), "shape"), (torch.full((3, 4), 0.5), "0 and 1"),
         (torch.full((3, 4), float("nan")), "0 and 1"), (-torch.ones(3, 4), "0 and 1")],
    )  # fmt: skip
    def test_bad_masks(self, mask, what):
        model = nn.Sequential(nn.Linear(4, 3))
        prune.identity(model[0], "weight")
        model[0].weight_mask = mask
        before = list(model.state_dict())
        with pytest.raises(MaskError, match=what) as caught:
            bake_masks(model)
        assert caught.value.where == "0.weight" and list(model.state_dict()) == before

    @pytest.mark.filterwarnings("ignore:.*deprecated")
    def test_old_weight_norm_is_refused(self):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 3)))
        with pytest.raises(ModelError, match="WeightNorm") as caught:
            bake_masks(copy_model(model))
        assert "remove_weight_norm" in caught.value.remedy


class TestBakeParametrize:
    def test_the_original_keeps_its_parametrization(self):
        model = net()
        names = list(model.state_dict())
        weight = model[3].weight.detach().clone()
        mask = mask_like(weight)
        parametrize.register_parametrization(model[3], "weight", Mask(mask))
        result = baked(model.eval())
        assert list(result.state_dict()) == names and type(result[3]) is nn.Linear
        assert torch.equal(result[3].weight, weight * mask) and not result[3].weight.signbit()[mask == 0].any()
        assert isinstance(result[3].weight, nn.Parameter)
        x = torch.randn(2, 3, 4, 4)  # deep copies share the generated class with the model: it must be intact
        assert parametrize.is_parametrized(model[3], "weight") and torch.equal(model(x), result(x))

    def test_torch_ao_sparsifier(self):
        model = net()
        sparsifier = torch.ao.pruning.WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1))
        sparsifier.prepare(model, [{"tensor_fqn": "3.weight"}])
        sparsifier.step()
        result = baked(model.eval())
        assert count(result).weights_alive == count(net()).weights - 40
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(model(x), result(x))

    def test_two_masks_on_two_tensors_and_a_chain(self):
        model = nn.Linear(4, 3)
        half = mask_like(model.weight)
        parametrize.register_parametrization(model, "weight", Mask(half))
        parametrize.register_parametrization(model, "weight", Mask(half.flip(0)))
        parametrize.register_parametrization(model, "bias", Mask(torch.tensor([1.0, 0.0, 1.0])))
        result = baked(model)
        assert torch.equal(result.weight != 0, (half * half.flip(0)) != 0) and result.bias[1] == 0
        assert list(result.state_dict()) == ["weight", "bias"] and not parametrize.is_parametrized(result)

    def test_the_cache_of_parametrize_is_not_read(self):
        model = nn.Linear(4, 3)
        parametrize.register_parametrization(model, "weight", Mask(torch.ones(3, 4)))
        with parametrize.cached():
            assert model.weight.all()
            replica = copy_model(model)
            replica.parametrizations.weight[0].mask.zero_()
            bake_masks(replica)
        assert not replica.weight.any()

    def test_eval_mode_is_what_counts(self):
        class Drop(nn.Module):
            def forward(self, weight):
                return nn.functional.dropout(weight, 0.5, self.training)

        model = nn.Linear(4, 3)
        parametrize.register_parametrization(model, "weight", Drop())
        assert torch.equal(baked(model.train()).weight, model.parametrizations.weight.original)

    @pytest.mark.parametrize(
        ("register", "name"),
        [(parametrizations.spectral_norm, "SpectralNorm"), (parametrizations.orthogonal, "Orthogonal"),
         (parametrizations.weight_norm, "WeightNorm")],
    )  # fmt: skip
    def test_others_are_refused(self, register, name):
        model = nn.ModuleDict({"head": register(nn.Linear(4, 4))})
        with pytest.raises(ModelError, match=name) as caught:
            bake_masks(copy_model(model))
        assert caught.value.where == "head.weight" and "remove_parametrizations" in caught.value.remedy

    @pytest.mark.parametrize("mask", [torch.full((3, 4), 0.5), torch.full((3, 4), float("nan")), torch.ones(2, 4)])
    def test_bad_masks(self, mask):
        model = nn.Linear(4, 3)
        parametrize.register_parametrization(model, "weight", torch.ao.pruning.FakeSparsity(torch.ones(3, 4)))
        model.parametrizations.weight[0].mask = mask
        with pytest.raises(MaskError) as caught:
            bake_masks(model)
        assert caught.value.where == "weight"


class TestFloat64:
    def test_parameters_buffers_and_tables_that_were_not_registered(self):
        model = nn.Linear(3, 2).half().requires_grad_(False)
        model.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        model.tables, model.names = {"mix": [torch.zeros(2), torch.zeros(2, dtype=torch.int32)]}, ["mix"]
        names = model.names
        to_float64(model)
        assert model.weight.dtype is torch.float64 and model.weight.requires_grad
        assert model.turn.dtype is torch.complex128
        assert [t.dtype for t in model.tables["mix"]] == [torch.float64, torch.int32] and model.names is names

    @pytest.mark.parametrize("lift", [False, True])
    def test_casts_and_factories(self, lift):
        x = torch.ones(2, dtype=torch.float64)
        with InFloat64(lift) as mode:
            made = [x.float(), x.to(torch.bfloat16), x.sum(dtype=torch.float32), x.softmax(0, dtype=torch.float32),
                    torch.zeros(2), torch.full((2,), 0.5), torch.tensor(0.5),
                    torch.zeros_like(x, dtype=torch.float16)]  # fmt: skip
            kept = [x.long(), torch.arange(3), x > 0, x.view(torch.int64)]
        assert all((t.dtype is torch.float64) == lift for t in made)
        assert [t.dtype for t in kept] == [torch.int64, torch.int64, torch.bool, torch.int64]
        assert torch.ops.aten.view.dtype in mode.ops


class TestFinite:
    def test_names_and_counts(self):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        with torch.no_grad():
            for layer in model:
                layer.weight[0] = float("nan")
            model[1].bias[0] = float("inf")
        with pytest.raises(WeightError) as caught:
            check_finite(model)
        assert caught.value.what.startswith("9 entries")
        assert caught.value.where == "0.weight (2 entries), 1.weight (2 entries), 1.bias (1 entries), and 2 more"

    def test_running_statistics_count_and_attention_masks_do_not(self):
        model = net()
        model.register_buffer("causal", torch.full((3, 3), float("-inf")).triu(1))
        check_finite(model)
        model[1].running_var[2] = float("inf")
        with pytest.raises(WeightError) as caught:
            check_finite(model)
        assert caught.value.where == "1.running_var (1 entries)"


class TestCounts:
    def test_prunable_names(self):
        model = nn.ModuleDict({
            "linear": nn.Linear(2, 3), "tied": nn.Linear(2, 3), "conv": nn.Conv1d(2, 2, 1),
            "up": nn.ConvTranspose2d(2, 2, 1), "norm": nn.LayerNorm(2), "embed": nn.Embedding(4, 2),
            "bilinear": nn.Bilinear(2, 2, 2), "packed": nn.MultiheadAttention(4, 2),
            "apart": nn.MultiheadAttention(4, 2, kdim=3, vdim=3),
        })  # fmt: skip
        model["tied"].weight = model["linear"].weight
        assert list(prunable(model)) == [
            "linear.weight", "conv.weight", "up.weight", "packed.in_proj_weight", "packed.out_proj.weight",
            "apart.q_proj_weight", "apart.k_proj_weight", "apart.v_proj_weight", "apart.out_proj.weight",
        ]  # fmt: skip

    def test_minus_zero_is_zero_and_tied_tensors_count_once(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        with torch.no_grad():
            model[0].weight.fill_(1.0)[0] = -0.0
            model[0].bias.fill_(1.0)
            model[1].bias.zero_()
        assert count(model) == Counts(params=24, params_alive=16, weights=16, weights_alive=12)

    def test_masks_are_applied_and_the_model_is_left_alone(self):
        model = nn.Linear(4, 4)
        prune.l1_unstructured(model, "weight", 0.25)
        names = list(model.state_dict())
        assert count(model) == Counts(params=20, params_alive=16, weights=16, weights_alive=12)
        assert list(model.state_dict()) == names
