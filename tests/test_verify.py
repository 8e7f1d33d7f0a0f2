"""verify: every way in which a rewritten network can be wrong on one path only is seen, and nothing is left changed."""

from __future__ import annotations

import collections
import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squeeze_release import masks
from squeeze_release.errors import InputError, VerificationError
from squeeze_release.masks import copy_model
from squeeze_release.verify import verify


class Fn(nn.Module):
    """A Linear or convolution, and a function after it."""

    def __init__(self, layer: nn.Module, after: Any) -> None:
        super().__init__()
        self.layer = layer
        self.after = after

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.after(self.layer(x), **kwargs)


def pair(layer: nn.Module, old: Any, new: Any) -> tuple[nn.Module, nn.Module]:
    return Fn(layer, old), Fn(copy.deepcopy(layer), new)


def failure(old: nn.Module, new: nn.Module, *args: Any, **kwargs: Any) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(old, new, [(args, kwargs)])
    assert "untouched" in caught.value.consequence
    return caught.value


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def variants(result: Any) -> list[str]:
    return [name for name, _ in result.variants]


class TestVariants:
    def test_convolutional_net(self):
        model = conv_net().train()
        result = verify(model, copy_model(model), [((torch.randn(2, 3, 8, 8),), {})])
        names = {name.rpartition(",")[0] for name in variants(result)}
        assert names == {"example", "random inputs, batch of 3", "batch of 1", "other resolution"}
        assert {"example, grad", "example, no_grad"} <= set(variants(result))
        assert result.max_error == result.max_error_user == 0.0 and result.seconds > 0

    def test_only_what_the_original_takes(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
        result = verify(model, copy_model(model), [((torch.randn(1, 3, 4, 4),), {})])
        assert variants(result)[2:] == ["random inputs, batch of 3, no_grad", "batch of 2, no_grad"]

    def test_tokens_of_another_length_with_their_mask(self):
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

            def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
                return self.head((self.embed(ids) * mask[..., None]).sum(1))

        model = Tokens()
        call = ((torch.randint(0, 10, (2, 5)),), {"mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()})
        result = verify(model, copy_model(model), [call])
        assert "other length, no_grad" in variants(result)

    @pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 8, 8)])
    def test_resolution_in_one_and_three_dimensions(self, shape):
        conv = nn.Conv1d if len(shape) == 3 else nn.Conv3d
        model = conv(3, 2, 3, padding=1)
        assert "other resolution, no_grad" in variants(verify(model, copy_model(model), [((torch.randn(shape),), {})]))

    def test_wrong_at_another_resolution_only(self):
        old, new = pair(nn.Conv2d(3, 2, 1), lambda y: y + 1, lambda y: y + (1 if y.shape[-1] == 8 else 0))
        assert "other resolution" in failure(old, new, torch.randn(2, 3, 8, 8)).where

    def test_raising_at_another_resolution_only(self):
        old, new = pair(nn.Conv2d(3, 2, 1), lambda y: y + 1, lambda y: y + torch.ones(8, 8))
        error = failure(old, new, torch.randn(2, 3, 8, 8))
        assert "other resolution" in error.where and "raises RuntimeError" in error.where
        assert isinstance(error.__cause__, RuntimeError)

    @pytest.mark.parametrize("batch", [1, 2, 3, 5])
    def test_wrong_at_another_batch_only(self, batch):
        old, new = pair(nn.Linear(3, 2), lambda y: y + 1, lambda y: y + (1 if len(y) == batch else 0))
        assert "batch of" in failure(old, new, torch.randn(batch, 3)).where

    def test_wrong_on_one_of_two_calls_only(self):
        old, new = pair(nn.Linear(3, 2), lambda y, s=1.0: y * s, lambda y, s=1.0: y)
        verify(old, new, [((x := torch.randn(2, 3),), {})])
        with pytest.raises(VerificationError):
            verify(old, new, [((x,), {}), ((x,), {"s": 2.0})])

    @pytest.mark.parametrize("example", [torch.zeros(2, 3), torch.ones(2, 3)])
    def test_an_example_without_information_is_not_all_that_runs(self, example):
        old = nn.Linear(3, 2, bias=False)
        new = copy.deepcopy(old)
        with torch.no_grad():
            new.weight.copy_(new.weight.flip(1))  # the same on equal inputs
        assert "random inputs" in failure(old, new, example).where

    def test_additive_masks_are_not_drawn_at_random(self):
        old, new = pair(nn.Linear(3, 4), lambda y, m: (y + m).softmax(-1), lambda y, m: (y + m).softmax(-1))
        with torch.no_grad():
            new.layer.weight.copy_(new.layer.weight.flip(1))
        failure(old, new, torch.zeros(1, 3), m=torch.tensor([[0.0, -torch.inf, 0.0, 0.0]]))  # not NaN everywhere


class SameAsLayerNorm(nn.LayerNorm):
    """Right when it is called; its parameters alone are not."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight * 2, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.fused_attn = True
        self.other_path_is_wrong: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.other_path_is_wrong == (not self.fused_attn):
            v = v * 2
        if self.fused_attn:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT * 8**-0.5).softmax(-1) @ v


class Configured(Attention):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = type("Config", (), {})()
        self.config._attn_implementation = implementation

    def forward(self, x: Tensor) -> Tensor:
        self.fused_attn = self.config._attn_implementation == "sdpa"
        return super().forward(x)


class TestPaths:
    @pytest.mark.parametrize("frozen", [False, True])
    def test_wrong_without_gradients_only(self, frozen):
        old = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        nn.init.normal_(old.norm1.weight)
        new = copy.deepcopy(old)
        new.norm1 = SameAsLayerNorm(8)
        new.norm1.weight.data = old.norm1.weight.data / 2
        x = torch.randn(2, 5, 8)
        assert torch.allclose(old(x), new(x), atol=1e-5)
        old.requires_grad_(not frozen)
        new.requires_grad_(not frozen)
        assert ", no_grad" in failure(old, new, x).where

    def test_wrong_with_gradients_only_though_frozen(self):
        old, new = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval() for _ in range(2))
        new.load_state_dict(old.state_dict())
        new.norm1.forward = lambda x: x
        x = torch.randn(2, 5, 8)
        with torch.no_grad():
            assert torch.allclose(old(x), new(x))
        assert ", grad" in failure(old.requires_grad_(False), new.requires_grad_(False), x).where

    @pytest.mark.parametrize("flag", [False, True])
    def test_wrong_on_timms_other_path_only(self, flag):
        old = nn.Sequential(Attention())
        old[0].fused_attn = flag
        new = copy.deepcopy(old)
        new[0].other_path_is_wrong = flag
        call = ((torch.randn(2, 5, 8),), {})
        assert "fused_attn switched" in failure(old, new, *call[0]).where
        errors = verify(old, new, [call, call], tolerance=torch.inf).variants
        assert [name for name, error in errors if error > 1e-10] == ["fused_attn switched, no_grad"] * 2

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_transformers_other_implementation(self, implementation):
        old = nn.Sequential(Configured(implementation))
        new = copy.deepcopy(old)
        new[0].other_path_is_wrong = implementation == "sdpa"
        assert "_attn_implementation switched, no_grad" in failure(old, new, torch.randn(2, 5, 8)).where
        assert old[0].config._attn_implementation == new[0].config._attn_implementation == implementation

    def test_a_forward_hook_is_part_of_the_model(self):
        old = nn.Linear(3, 2)
        new = copy.deepcopy(old)
        old.register_forward_hook(lambda module, args, output: output + 1)
        failure(old, new, torch.randn(2, 3))
        new.register_forward_hook(lambda module, args, output: output + 1)
        verify(old, new, [((torch.randn(2, 3),), {})])


@dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]


Pair = collections.namedtuple("Pair", "left right")


class TestOutputs:
    @pytest.mark.parametrize(
        ("wrap", "where"),
        [(lambda a, b: {"logits": a, "aux": [b]}, "output['aux'][0]"), (lambda a, b: Pair(a, b), "output[1]"),
         (lambda a, b: (a, {"d": (b,)}), "output[1]['d'][0]"), (lambda a, b: Result(a, [b]), "output['hidden'][0]"),
         (lambda a, b: torch.distributions.Normal(a, b.exp()), "output['scale']")],
    )  # fmt: skip
    def test_containers(self, wrap, where):
        old, new = pair(nn.Linear(3, 2), lambda y: wrap(1e9 * y, y), lambda y: wrap(1e9 * y, y * (1 + 1e-8)))
        verify(old, copy.deepcopy(old), [((torch.randn(2, 3),), {})])
        assert failure(old, new, torch.randn(2, 3)).where.startswith(where)

    @pytest.mark.parametrize(
        ("old", "new"),
        [(lambda y: (y, y), lambda y: (y,)), (lambda y: (y,), lambda y: [y]), (lambda y: {"a": y}, lambda y: {"b": y}),
         (lambda y: (y, None), lambda y: (y, 1)), (lambda y: (y, 3), lambda y: (y, 4)), (lambda y: y, lambda y: y[:1])],
    )  # fmt: skip
    def test_another_structure(self, old, new):
        failure(*pair(nn.Linear(3, 2), old, new), torch.randn(2, 3))

    def test_tolerance(self):
        old, new = pair(nn.Linear(3, 2), lambda y: 1e5 * y, lambda y: 1e5 * y * (1 + 1e-9))
        assert "1.0e-09" in failure(old, new, torch.randn(2, 3)).what
        old, new = pair(nn.Linear(3, 2), lambda y: 1e5 * y, lambda y: 1e5 * y * (1 + 1e-11))
        assert 0 < verify(old, new, [((torch.randn(2, 3),), {})]).max_error < 1e-10

    def test_masked_logits_do_not_hide_an_error(self):
        def masked(y: Tensor) -> Tensor:
            return torch.cat([y, torch.full_like(y, torch.finfo(torch.float32).min)], -1)

        old, new = pair(nn.Linear(3, 2), masked, lambda y: masked(y + 1e-3))
        failure(old, new, torch.randn(2, 3))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_not_finite(self, value):
        def spoil(y: Tensor, row: int) -> Tensor:
            return y.index_fill(1, torch.tensor([row]), value)

        old, new = pair(nn.Linear(3, 2), lambda y: spoil(y, 0), lambda y: spoil(y, 0) * 1.0)
        assert verify(old, new, [((torch.randn(2, 3),), {})]).max_error == 0.0
        failure(*pair(nn.Linear(3, 2), lambda y: spoil(y, 0), lambda y: spoil(y, 1)), torch.randn(2, 3))
        failure(*pair(nn.Linear(3, 2), lambda y: y, lambda y: spoil(y, 1)), torch.randn(2, 3))
        failure(*pair(nn.Linear(3, 2), lambda y: spoil(y, 1), lambda y: y), torch.randn(2, 3))

    def test_minus_zero_is_zero(self):
        old, new = pair(nn.Linear(3, 2), lambda y: (y * 0).abs(), lambda y: -(y * 0).abs())
        assert verify(old, new, [((torch.randn(2, 3),), {})]).max_error == 0.0

    @pytest.mark.parametrize("exact", [lambda y: y.argmax(-1), lambda y: y > 0, lambda y: y.shape[0]])
    def test_integers_and_booleans_are_equal_or_wrong(self, exact):
        verify(*pair(nn.Linear(3, 2), exact, exact), [((torch.randn(2, 3),), {})])
        failure(*pair(nn.Linear(3, 2), exact, lambda y: exact(y) == 2), torch.randn(2, 3))


class RMSNorm(nn.Module):
    """As in transformers: statistics in float32, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        out = torch.zeros(x.shape)  # and a table in the default dtype that is written into
        out += wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.softmax(out, -1, dtype=torch.float32).to(x.dtype)


def permuted() -> tuple[nn.Module, nn.Module]:
    """Two networks with one function, that add in another order."""
    old = nn.Sequential(nn.Linear(9, 64), RMSNorm(), nn.Linear(64, 5))
    new = copy.deepcopy(old)
    order = torch.randperm(64)
    new[0].weight.data, new[0].bias.data = old[0].weight.data[order], old[0].bias.data[order]
    new[2].weight.data = old[2].weight.data[:, order]
    return old, new


class TestPrecision:
    def test_casts_to_float32_do_not_cost_digits(self):
        old, new = permuted()
        result = verify(old, new, [((torch.randn(4, 9),), {})])
        assert result.max_error < 1e-14 < 1e-9 < result.max_error_user < 1e-5

    def test_and_without_the_mode_they_would(self, monkeypatch):
        monkeypatch.setattr(masks, "_wider_dtype", lambda value: value)
        monkeypatch.setattr(masks, "_creates_tensor", lambda func: False)
        old, new = permuted()
        failure(old, new, torch.randn(4, 9))

    def test_wrong_in_the_users_dtype_only(self):
        old, new = pair(nn.Linear(3, 2), lambda y: y, lambda y: (y + 3e4) - 3e4)
        assert verify(copy.deepcopy(old).double(), copy.deepcopy(new).double(), [((torch.randn(2, 3).double(),), {})])
        assert "own dtype" in failure(old, new, torch.randn(2, 3)).where

    def test_the_originals_own_rounding_is_no_fault_of_the_new_one(self):
        old, new = pair(nn.Linear(3, 2), lambda y: (y + 3e4) - 3e4, lambda y: (y + 4e4) - 4e4)
        assert verify(old, new, [((torch.randn(2, 3),), {})]).max_error_user > 1e-5

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        old = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
        verify(old, copy_model(old), [((torch.randn(2, 3, dtype=dtype),), {})])

    def test_weights_folded_in_float64_and_rounded(self):
        old = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        exact = copy.deepcopy(old).double()
        exact[1].weight.data *= 1 / 3
        exact[0].weight.data *= 3
        exact[0].bias.data *= 3
        new = copy.deepcopy(exact).float()
        failure(old, new, torch.randn(2, 3))
        result = verify(old, new, [((torch.randn(2, 3),), {})], exact=exact)
        assert result.max_error < 1e-14 and 0 < result.max_error_user < 1e-6

    def test_autocast_around_the_call_is_off_inside(self):
        old, new = pair(nn.Linear(3, 2), lambda y: y * (1 + torch.is_autocast_enabled("cpu")), lambda y: y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            verify(old, new, [((torch.randn(2, 3),), {})])


def noisy(width: int) -> nn.Module:
    return Fn(nn.Identity(), lambda y: y + torch.randn(2, width).mean())


class TestRandomness:
    def test_equal_draws_are_no_difference(self):
        verify(noisy(4), noisy(4), [((torch.randn(2, 3),), {})])

    @pytest.mark.parametrize("make", [noisy, lambda n: Fn(nn.Identity(), lambda y: y + random.random())])
    def test_otherwise_the_original_is_at_fault(self, make):
        error = failure(make(4), make(5), torch.randn(2, 3))
        assert "not deterministic" in error.what and "verify=False" in error.remedy


class TestLeavesEverythingAsItWas:
    def test_models_inputs_and_random_numbers(self):
        old = conv_net().train()
        old[1].eval()
        old[0].weight.requires_grad_(False)
        old(torch.randn(2, 3, 8, 8)).sum().backward()
        new = copy.deepcopy(old)
        old.register_forward_hook(lambda module, args, output: None)
        before = [self.everything(model) for model in (old, new)]
        x = torch.randn(2, 3, 8, 8)
        kept, state = x.clone(), torch.get_rng_state()
        verify(old, new, [((x,), {})])
        assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
        for model, (tensors, rest) in zip((old, new), before, strict=True):
            now, rest_now = self.everything(model)
            assert rest == rest_now and all(torch.equal(a, b) for a, b in zip(tensors, now, strict=True))

    @staticmethod
    def everything(model: nn.Module) -> tuple[list[Tensor], Any]:
        tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None] + list(model.buffers())
        rest = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        return [t.detach().clone() for t in tensors], (rest, [(p.requires_grad, p.dtype) for p in model.parameters()])

    def test_also_when_it_fails(self):
        old, new = conv_net(), conv_net()
        before, state = self.everything(old)[1], torch.get_rng_state()
        failure(old, new, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
        assert self.everything(old)[1] == before and torch.equal(torch.get_rng_state(), state)

    def test_a_model_that_writes_into_its_input(self):
        old, new = (Fn(nn.Identity(), lambda y: y.add_(1)) for _ in range(2))
        x = torch.zeros(2, 3)
        verify(old, new, [((x,), {})])
        assert not x.any()


def test_forces_are_derivatives_taken_inside_the_model():
    class Energy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(super().forward(x.sin()).sum(), x)[0]

    model = Energy(3, 1)
    result = verify(model, copy_model(model), [((torch.randn(2, 3, requires_grad=True),), {})])
    assert "example, grad" in variants(result) and "example, no_grad" not in variants(result)


def test_example_inputs_that_do_not_fit():
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="does not run on the example inputs"):
        verify(model, copy_model(model), [((torch.randn(2, 4),), {})])
    with pytest.raises(ValueError, match="at least one"):
        verify(model, copy_model(model), [])
