"""Vision transformers, timm's and torchvision's: heads, their widths, dead branches."""

from __future__ import annotations

from typing import NamedTuple

import counting
import pytest
import timm
import torch
import torch.nn.functional as F
from check import assert_same, check, error, noisy, seeded
from counting import TransformerBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import vit_b_16
from torchvision.models.vision_transformer import EncoderBlock
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionVit

import squeeze_release as sr
from squeeze_release.modules import CompensatedLayerNorm

HEADS = {"timm": 6, "torchvision": 6, "torchvision's vit_b_16": 12}
LIBRARIES = ["timm", "torchvision"]
ALL = [*LIBRARIES, pytest.param("torchvision's vit_b_16", marks=pytest.mark.slow)]  # 86M parameters


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks if isinstance(model, VisionTransformer) else model.encoder.layers)


def parts(block: nn.Module) -> TransformerBlock:
    """None for what is no longer there."""
    theirs = isinstance(block, EncoderBlock)
    attention, norms = ("self_attention", ("ln_1", "ln_2")) if theirs else ("attn", ("norm1", "norm2"))
    inner = ("in_proj_weight", "in_proj_bias", "out_proj") if theirs else ("qkv.weight", "qkv.bias", "proj")
    layers = [block.get_submodule(name) for name in (norms[0], attention, norms[1], "mlp")]
    held = dict(block.named_parameters()) | dict(block.named_modules())
    return TransformerBlock(
        *layers[:2],
        *(held.get(f"{attention}.{name}") for name in inner),
        *layers[2:],
        *(held.get(f"mlp.{name}") for name in (("0", "3") if theirs else ("fc1", "fc2"))),
    )


def random(model: nn.Module) -> nn.Module:
    noisy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # torchvision's head is 0, and so are class tokens
            if parameter.dim() > 1 and ("head" in name or "token" in name):
                parameter.normal_(0, 0.1)
    return model.eval()


def real(library: str, size: int) -> nn.Module:
    seeded()
    if library == "timm":
        return random(timm.create_model("vit_small_patch16_224", img_size=size, num_classes=10))
    if library == "torchvision":  # as wide as timm's
        return random(TorchvisionVit(size, 16, 12, HEADS[library], 384, 1536, num_classes=10))
    return random(vit_b_16(image_size=size, num_classes=10))


def little(**options: object) -> VisionTransformer:
    seeded()
    shape = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5, **options}
    return random(VisionTransformer(**shape))  # type: ignore[arg-type, return-value]


def images(size: int = 32, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=dtype)


# ---------------------------------------------------------------- one case a block


CASES = list(counting.TRANSFORMER_MASKS)
# What is left of each: heads, and dimensions of a head. One projection serves q, k and v, so they go together.
GOLDEN = {
    "mlp_width": (0, 64),
    "dead_heads": (-2, 64),
    "same_places": (0, 56),
    "ragged_places": (0, 56),
    "only_qk": (0, 64),
    "only_v": (0, 64),
    "fc2_dead": (0, 64),
    "attention_twins": (0, 64),
}
DEAD_ATTENTION = ["proj_dead", "block_dead", "dead_at_the_start"]
DEAD_MLP = ["fc2_dead", "block_dead", "dead_at_the_start"]


class Squeezed(NamedTuple):
    library: str
    masked: nn.Module
    small: nn.Module
    report: sr.report.Report

    @property
    def heads(self) -> int:
        return HEADS[self.library]

    def block(self, case: str) -> nn.Module:
        return blocks(self.small)[CASES.index(case)]


def masked_model(library: str, size: int) -> nn.Module:
    model = real(library, size)
    with torch.no_grad():
        for block, case in zip(blocks(model), CASES, strict=True):
            counting.TRANSFORMER_MASKS[case](parts(block), HEADS[library])
    return model


@pytest.fixture(scope="module", params=ALL)
def vit(request: pytest.FixtureRequest) -> Squeezed:
    """The real model with every case in it: exact, with the same gradients, and the original untouched."""
    model = masked_model(request.param, 32)
    return Squeezed(request.param, model, *check(model, images(), again=False))


def inside(block: nn.Module) -> tuple[int, int, int]:
    """Heads, dimensions of q and k, dimensions of v, as the parameters have them."""
    b = parts(block)
    heads = b.attention.num_heads
    v = b.proj.in_features // heads
    assert tuple(b.proj.weight.shape) == (b.proj.out_features, heads * v)
    return heads, (len(b.qkv) // heads - v) // 2, v


def test_golden_heads(vit: Squeezed) -> None:
    for case, (heads, width) in GOLDEN.items():
        golden = (vit.heads + heads, width, width)
        assert inside(vit.block(case)) == golden, f"{case}\n{vit.report}"
    assert inside(vit.block("almost_dead")) == (1, 64, 64)


def test_heads_are_what_counting_allows(vit: Squeezed) -> None:
    for case, old, new in zip(CASES, blocks(vit.masked), blocks(vit.small), strict=True):
        b = parts(old)
        allowed = counting.attention(b.qkv, b.qkv_bias, b.proj.weight, vit.heads)
        assert (allowed.heads == 0) == (case in DEAD_ATTENTION)
        if allowed.heads:
            together = max(allowed.qk, allowed.v)
            assert inside(new) == (allowed.heads, together, together), f"{case}\n{vit.report}"


def test_squeezing_twice_removes_nothing(vit: Squeezed) -> None:
    _, again = sr.squeeze(vit.small, images(), verify=False)
    assert again.params_after == vit.report.params_after, str(again)


def test_mlp_widths_are_what_counting_allows(vit: Squeezed) -> None:
    for case, old, new in zip(CASES, blocks(vit.masked), blocks(vit.small), strict=True):
        if case not in DEAD_MLP:
            was, now = parts(old), parts(new)
            _, inner, _ = counting.fc_widths([was.fc1.weight, was.fc2.weight])
            assert now.fc1.out_features == now.fc2.in_features == inner, case
            assert now.fc1.in_features == was.fc1.in_features and type(now.norm2) is type(was.norm2)
    full = parts(blocks(vit.masked)[0]).fc1.out_features
    assert parts(vit.block("mlp_width")).fc1.out_features == full - 200
    assert parts(vit.block("attention_twins")).fc1.out_features == full
    assert parts(vit.block("almost_dead")).fc1.out_features == 1


def test_a_dead_branch_costs_at_most_one_vector(vit: Squeezed) -> None:
    width = parts(blocks(vit.masked)[0]).norm1.weight.numel()
    attention, mlp = parts(vit.block("proj_dead")), parts(vit.block("fc2_dead"))
    assert counting.size(attention.norm1, attention.attention) <= width, str(vit.report)
    assert counting.size(mlp.norm2, mlp.mlp) <= width, str(vit.report)
    for case in ("block_dead", "dead_at_the_start"):
        assert counting.size(vit.block(case)) <= width, str(vit.report)


def test_the_softmax_scale_is_that_of_the_full_head(vit: Squeezed) -> None:
    """Both ways of timm's attention, and other batch sizes, give what the original gives."""
    modules = [*vit.masked.modules(), *vit.small.modules()]
    switches = [module for module in modules if hasattr(module, "fused_attn")]
    assert bool(switches) == (vit.library == "timm")
    for fused in (True, False):
        for module in switches:
            module.fused_attn = fused
        assert_same(vit.masked, vit.small, (images(batch=1 + 2 * fused),), {})
    for module in switches:
        module.fused_attn = True


@pytest.mark.parametrize("library", ALL)
def test_224_px_in_float32(library: str) -> None:
    model = masked_model(library, 224)
    x = images(224, 1, torch.float32)
    small, _ = sr.squeeze(model, x, verify=False)
    with torch.no_grad():
        assert error(model(x), small(x)) <= 1e-5


# ---------------------------------------------------------------- small ones


def test_layer_scale_zero_kills_a_branch() -> None:
    model = little(init_values=0.5)
    with torch.no_grad():
        model.blocks[0].ls1.gamma.zero_()
        model.blocks[1].ls2.gamma.zero_()
    small, report = check(model, images())
    first, second = small.blocks
    assert counting.size(first.norm1, first.attn, first.ls1) <= 32, str(report)
    assert counting.size(second.norm2, second.mlp, second.ls2) <= 32, str(report)
    assert inside(second) == (4, 8, 8) and first.mlp.fc1.out_features == 128  # the others stay


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_constant_function(library: str) -> None:
    model = little() if library == "timm" else random(TorchvisionVit(32, 16, 2, 4, 48, 64, num_classes=5))
    with torch.no_grad():
        (model.head if library == "timm" else model.heads.head).weight.zero_()
    small, report = check(model, images(), gradients=False)
    assert report.params_after <= 300, str(report)  # one channel of the patches is a 16 x 16 kernel
    assert torch.equal(*small(images(batch=2)).split(1))


def stream_channels(model: VisionTransformer, count: int) -> None:
    """Channels of the residual stream that are 0 from the first to the last layer, and that nobody reads."""
    with torch.no_grad():
        for tensor in (model.patch_embed.proj.weight, model.patch_embed.proj.bias):
            tensor[:count] = 0
        for tensor in (model.cls_token, model.pos_embed):
            tensor[..., :count] = 0
        for block in model.blocks:
            for writer in (block.attn.proj, block.mlp.fc2):
                writer.weight[:count], writer.bias[:count] = 0, 0
            block.attn.qkv.weight[:, :count], block.mlp.fc1.weight[:, :count] = 0, 0
        model.head.weight[:, :count] = 0


def test_a_stream_channel_goes_from_the_whole_model() -> None:
    model = little()
    stream_channels(model, 5)
    with torch.no_grad():
        model.pos_embed[0, 2, 3] = 0.5  # does not depend on the input, but on the position
        model.blocks[1].attn.proj.bias[4] = 0.5  # a constant for the later norms, 0 for the earlier ones
    small, _ = check(
        model,
        images(),
        golden={
            "patch_embed.proj.out_channels": 28,
            "pos_embed": (1, 5, 28),
            "cls_token": (1, 1, 28),
            "norm": CompensatedLayerNorm,
            "blocks.0.attn.qkv.in_features": 28,
            "blocks.1.mlp.fc2.out_features": 28,
            "head.in_features": 28,
        },
    )
    assert int(small.norm.count) == 4


WIDTHS = {"A": ((4, 8, 8), 4, 32), "AB": ((4, 8, 8), 4, 32), "paper": ((3, 8, 8), 4, 32), "all": ((3, 8, 8), 4, 30)}


@pytest.mark.parametrize("rules", WIDTHS)
def test_rule_sets(rules: str) -> None:
    """A and AB leave attention alone, the paper's rules take whole heads, all take dimensions and streams too."""
    model = little(depth=3)
    stream_channels(model, 2)
    with torch.no_grad():
        counting.by_head(model.blocks[0].attn.qkv.weight, 4)[2, 1] = 0
        counting.by_head(model.blocks[1].attn.qkv.weight, 4)[1:, :, :2] = 0
        model.blocks[2].mlp.fc1.weight[4:] = 0
    small, report = check(model, images(), rules=rules)
    heads, inner, stream = WIDTHS[rules]
    assert inside(small.blocks[0]) == heads, str(report)
    assert inside(small.blocks[1]) == ((4, 6, 6) if rules == "all" else (4, 8, 8))
    assert small.blocks[2].mlp.fc1.out_features == inner and small.head.in_features == stream


def test_squeeze_train_prune_squeeze_again() -> None:
    model = little().double()
    stream_channels(model, 3)
    with torch.no_grad():
        counting.by_head(model.blocks[0].attn.qkv.weight, 4)[1:, :, :2] = 0
    small, first = check(model, images())
    assert int(small.norm.count) == 3 and inside(small.blocks[0]) == (4, 6, 6)
    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.05)
    F.cross_entropy(small(images(batch=4)), torch.randint(5, (4,))).backward()
    optimizer.step()
    small.eval()
    stream_channels(small, 2)
    with torch.no_grad():
        counting.by_head(small.blocks[0].attn.qkv.weight, 4)[2, 1] = 0
    smaller, second = check(small, images())
    assert inside(smaller.blocks[0]) == (3, 6, 6) and smaller.head.in_features == 32 - 5
    assert isinstance(smaller.norm, CompensatedLayerNorm) and int(smaller.norm.count) == 5
    assert second.params_after < first.params_after
