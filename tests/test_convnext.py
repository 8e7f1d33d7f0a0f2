"""ConvNeXt, timm's and torchvision's: the paper's modes A, B and C, block by block in the real convnext_tiny."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import counting
import pytest
import timm
import torch
from check import assert_same, check, error, noisy, seeded
from timm.models.convnext import ConvNeXt
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torchvision.models import convnext_tiny
from torchvision.models.convnext import CNBlock, CNBlockConfig
from torchvision.models.convnext import ConvNeXt as TorchvisionConvNeXt

import squeeze_release as sr
from squeeze_release.modules import CompensatedLayerNorm

LIBRARIES = ["timm", "torchvision"]


class Block(NamedTuple):
    """The parts of a block by what they are, whoever wrote it."""

    dw: nn.Conv2d
    norm: nn.Module
    pw1: nn.Linear
    pw2: nn.Linear
    gamma: Tensor


class Stages(NamedTuple):
    blocks: list[list[nn.Module]]
    downsample: list[nn.Module]  # norm and convolution in front of stages 1 to 3
    norm: nn.Module  # the last one
    head: nn.Linear


def stages(model: nn.Module) -> Stages:
    if isinstance(model, ConvNeXt):
        each = [list(stage.blocks) for stage in model.stages]
        return Stages(each, [stage.downsample for stage in list(model.stages)[1:]], model.head.norm, model.head.fc)
    f = model.features
    norm, _, head = model.classifier
    return Stages([list(f[i]) for i in (1, 3, 5, 7)], [f[i] for i in (2, 4, 6)], norm, head)


def parts(block: nn.Module) -> Block:
    if isinstance(block, CNBlock):
        return Block(block.block[0], block.block[2], block.block[3], block.block[5], block.layer_scale)
    return Block(block.conv_dw, block.norm, block.mlp.fc1, block.mlp.fc2, block.gamma)


def every_block(model: nn.Module) -> Iterator[nn.Module]:
    return (block for stage in stages(model).blocks for block in stage)


def random(model: nn.Module) -> nn.Module:
    """Layer scales are 3-d in torchvision, and 1e-6 in both: numbers of order 1 instead, so that blocks matter."""
    noisy(model)
    with torch.no_grad():
        for block in every_block(model):
            parts(block).gamma.uniform_(0.2, 0.6)
    return model.eval()


def real(library: str) -> nn.Module:
    seeded()
    timms = library == "timm"
    return random(timm.create_model("convnext_tiny", num_classes=10) if timms else convnext_tiny(num_classes=10))


def little(library: str = "timm") -> nn.Module:
    """The same code, small."""
    seeded()
    if library == "timm":
        return random(ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 12, 16, 20), num_classes=5))
    setting = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, 16, 1), CNBlockConfig(16, 20, 2), CNBlockConfig(20, None, 1)]
    return random(TorchvisionConvNeXt(setting, num_classes=5))


def images(size: int = 64, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=dtype)


# ---------------------------------------------------------------- one case a block, with its golden widths

Case = Callable[[Block], object]


def dead_rows(b: Block) -> None:
    b.pw1.weight[:40] = 0


def dead_columns(b: Block) -> None:
    b.pw2.weight[:, 10:60] = 0


def rows_and_columns(b: Block) -> None:
    b.pw1.weight[:40] = 0
    b.pw2.weight[:, 20:70] = 0


def mode_b(b: Block) -> None:
    b.dw.weight[:30] = 0
    b.pw1.weight[:, :30] = 0


def mode_b_twins(b: Block) -> None:
    b.pw1.weight[:, :10] = 0  # unread, but it depends on the input and enters the statistics
    b.dw.weight[10] = 0  # one constant, but it is read


def mode_b_behind_dead_rows(b: Block) -> None:
    b.dw.weight[5:25] = 0
    b.pw1.weight[100:, 5:25] = 0  # read by the first 100 alone, and
    b.pw2.weight[:, :100] = 0  # those are unread


def pw2_dead(b: Block) -> None:
    b.pw2.weight.zero_()


def gamma_dead(b: Block) -> None:
    b.gamma.zero_()


def pw1_dead(b: Block) -> None:
    b.pw1.weight.zero_()


def norm_dead(b: Block) -> None:
    b.norm.weight.zero_()


def mode_c_twin(b: Block) -> None:
    b.pw2.weight.zero_()
    b.pw2.weight[3, 7] = 0.5  # one weight keeps the block, one channel wide


def sums_to_zero(b: Block) -> None:
    b.pw1.weight[0] = 0
    b.pw1.weight[0, 0], b.pw1.weight[0, 1] = 0.5, -0.5
    b.pw1.weight[:, 2] = 0
    b.dw.weight[2] = 0
    b.dw.weight[2, 0, 0, 0], b.dw.weight[2, 0, 0, 1] = 0.5, -0.5


def dead_output_rows(b: Block) -> None:
    b.pw2.weight[:100] = 0  # nothing is added to these channels, but the stream has them


def sparse(b: Block) -> None:
    counting.sparsify(0.998, b.pw1.weight, b.pw2.weight)
    b.dw.weight[torch.rand(len(b.dw.weight)) < 0.6] = 0


CASES: dict[tuple[int, int], tuple[Case, int, int]] = {  # (stage, block): case, between DWConv and PWConv1, inner
    (0, 0): (dead_rows, 96, 384 - 40),
    (0, 1): (dead_columns, 96, 384 - 50),
    (0, 2): (rows_and_columns, 96, 384 - 70),
    (1, 0): (mode_b, 192 - 30, 768),
    (1, 1): (mode_b_twins, 192, 768),
    (1, 2): (mode_b_behind_dead_rows, 192 - 20, 768 - 100),
    (2, 3): (mode_c_twin, 384, 1),
    (2, 4): (sums_to_zero, 384, 1536),
    (2, 5): (dead_output_rows, 384, 1536),
}
SHIFTS = {(2, 0): pw2_dead, (2, 2): pw1_dead, (2, 8): norm_dead}
GONE, SPARSE = (2, 1), (2, 6)


def mask_stream(model: nn.Module) -> None:
    """The last stage: nine channels that every writer leaves constant, and a twin."""
    where = stages(model)
    conv = where.downsample[2][1]
    conv.weight[:10] = 0
    for block in map(parts, where.blocks[3]):
        block.dw.weight[:10] = 0
        block.pw1.weight[:, :10] = 0
        block.pw2.weight[:10] = 0
    first = parts(where.blocks[3][0])
    first.dw.weight[8] = torch.randn_like(
        first.dw.weight[8]
    )  # reads a constant in front of padding: channel 9 carries it
    first.pw2.weight[9, 5] = 0.5  # not a constant from here on
    where.head.weight[:, :10] = 0


class Squeezed(NamedTuple):
    masked: nn.Module
    small: nn.Module
    report: sr.report.Report


def masked_model(library: str) -> nn.Module:
    model = real(library)
    with torch.no_grad():
        blocks = stages(model).blocks
        for (i, j), (case, _, _) in CASES.items():
            case(parts(blocks[i][j]))
        for (i, j), case in {**SHIFTS, GONE: gamma_dead, SPARSE: sparse}.items():
            case(parts(blocks[i][j]))
        mask_stream(model)
    return model


@pytest.fixture(scope="module", params=LIBRARIES)
def tiny(request: pytest.FixtureRequest) -> Squeezed:
    """convnext_tiny with every case in it: exact, with the same gradients, and the original untouched."""
    model = masked_model(request.param)
    return Squeezed(model, *check(model, images(), again=False))


def test_golden_widths(tiny: Squeezed) -> None:
    blocks = stages(tiny.small).blocks
    for (i, j), (case, between, inner) in CASES.items():
        b = parts(blocks[i][j])
        assert (b.pw1.in_features, b.pw1.out_features) == (between, inner), f"{case.__name__}\n{tiny.report}"
        assert b.pw2.in_features == inner
        assert b.dw.weight.shape[0] == b.dw.out_channels == b.dw.groups == between
        assert tuple(b.norm.weight.shape) == (between,)
        full = parts(stages(tiny.masked).blocks[i][j]).dw.out_channels
        assert isinstance(b.norm, CompensatedLayerNorm) == (between < full)


def test_every_block_is_what_counting_allows(tiny: Squeezed) -> None:
    counted = 0
    for old, new in zip(every_block(tiny.masked), every_block(tiny.small), strict=True):
        was = parts(old)
        if type(new) is not type(old):
            continue
        allowed = counting.convnext_block(was.dw.weight, was.pw1.weight, was.pw2.weight)
        now = parts(new)
        assert now.pw1.out_features == allowed.inner and now.pw1.in_features <= allowed.between
        counted += 1
    assert counted == 3 + 3 + 9 + 3 - len(SHIFTS) - 1
    b = parts(stages(tiny.small).blocks[SPARSE[0]][SPARSE[1]])
    assert b.pw1.in_features < 384 and b.pw1.out_features < 700
    assert isinstance(b.norm, CompensatedLayerNorm) and int(b.norm.count) == 384 - b.pw1.in_features


def test_a_dead_block_costs_at_most_one_shift_vector(tiny: Squeezed) -> None:
    blocks = stages(tiny.small).blocks
    for i, j in SHIFTS:
        assert isinstance(blocks[i][j], sr.modules.Shift) and counting.size(blocks[i][j]) == 384
    assert counting.size(blocks[GONE[0]][GONE[1]]) == 0


def test_a_stream_channel_goes_from_the_whole_stage(tiny: Squeezed) -> None:
    where = stages(tiny.small)
    assert where.downsample[2][1].out_channels == 768 - 9
    for block in map(parts, where.blocks[3]):
        assert block.pw2.out_features == block.gamma.numel() == 768 - 9
        assert block.pw1.in_features <= 768 - 9  # channel 9 has a dead filter and column in every block
    assert isinstance(where.norm, CompensatedLayerNorm) and int(where.norm.count) == 9
    assert where.head.in_features == 768 - 9 and where.head.out_features == 10
    assert where.downsample[1][1].out_channels == 384  # the stages before keep theirs


def test_squeezing_twice_removes_nothing(tiny: Squeezed) -> None:
    _, again = sr.squeeze(tiny.small, images(), verify=False)
    assert again.params_after == tiny.report.params_after, str(again)


def test_other_batches_and_resolutions(tiny: Squeezed) -> None:
    for size, batch in ((32, 3), (96, 1)):
        assert_same(tiny.masked, tiny.small, (images(size, batch),), {})


@pytest.mark.parametrize("library", LIBRARIES)
def test_224_px_in_float32(library: str) -> None:
    model = masked_model(library)
    x = images(224, 1, torch.float32)
    small, _ = sr.squeeze(model, x, verify=False)
    with torch.no_grad():
        assert error(model(x), small(x)) <= 1e-5


# ---------------------------------------------------------------- small ones


@pytest.mark.parametrize("where", ["head", "norm"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_constant_function(library: str, where: str) -> None:
    model = little(library)
    with torch.no_grad():
        getattr(stages(model), where).weight.zero_()
    small, report = check(model, images(), gradients=False)
    assert report.params_after <= 100, str(report)
    assert torch.equal(*small(images(32, 2)).split(1))


def conv_pair(padding: int, bias: float) -> nn.Sequential:
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=padding)))
    with torch.no_grad():
        net[0].weight[2] = 0
        net[0].bias[2] = bias
    return net  # type: ignore[return-value]


@pytest.mark.parametrize(("padding", "bias", "width"), [(1, 0.7, 6), (1, -0.7, 5), (0, 0.7, 5), (0, -0.7, 5)])
def test_a_constant_in_front_of_a_convolution(padding: int, bias: float, width: int) -> None:
    """Zero padding makes the border of a constant differ, unless it is 0 (as it is behind this ReLU)."""
    net = conv_pair(padding, bias)
    small, _ = check(net, images(16), golden={"0.out_channels": width, "2.in_channels": width})
    assert_same(net, small, (images(9, 3),), {})


def test_unread_input_channels_of_a_convolution() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3)))
    with torch.no_grad():
        net[0].weight[:, 1] = 0
    small, _ = check(net, images(16), golden={"0.weight": (6, 2, 3, 3)})
    assert small[0].index.tolist() == [0, 2] and small(images(20, 3)).shape == (3, 4, 18, 18)


def every_mode(model: nn.Module) -> None:
    """Mode A in the first block, B in the second, C in the third, a constant stream channel in the last stage."""
    where = stages(model)
    blocks = [parts(block) for block in every_block(model)]
    with torch.no_grad():
        blocks[0].pw1.weight[:5] = 0
        blocks[1].dw.weight[:3] = 0
        blocks[1].pw1.weight[:, :3] = 0
        blocks[2].pw2.weight.zero_()
        where.downsample[2][1].weight[:2] = 0
        blocks[4].dw.weight[:2] = 0
        blocks[4].pw1.weight[:, :2] = 0
        blocks[4].pw2.weight[:2] = 0
        where.head.weight[:, :2] = 0


GOLDEN = {  # rules: between DWConv and PWConv1 of the second block and of the last one, stream of the last stage
    "A": (12, 20, 20),
    "AB": (12 - 3, 20 - 2, 20),
    "paper": (12 - 3, 20 - 2, 20),
    "all": (12 - 3, 20 - 2, 20 - 2),
}


@pytest.mark.parametrize("rules", GOLDEN)
@pytest.mark.parametrize("library", LIBRARIES)
def test_rule_sets(rules: str, library: str) -> None:
    model = little(library)
    every_mode(model)
    small, report = check(model, images(), rules=rules, again=library == "timm")
    where, blocks = stages(small), list(every_block(small))
    assert parts(blocks[0]).pw1.out_features == 32 - 5  # Mode A
    assert isinstance(blocks[2], sr.modules.Shift)  # Mode C
    have = parts(blocks[1]).dw.out_channels, parts(blocks[4]).dw.out_channels, where.downsample[2][1].out_channels
    assert have == GOLDEN[rules], str(report)
    compensated = [module for module in small.modules() if isinstance(module, CompensatedLayerNorm)]
    assert bool(compensated) == (rules != "A")


def test_prune_parametrize_and_plain_zeros_give_the_same_network() -> None:
    plain = little()
    pruned, parametrized = copy.deepcopy(plain), copy.deepcopy(plain)
    every_mode(plain)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            mask = (module.weight != 0).float()
            prune.custom_from_mask(pruned.get_submodule(name), "weight", mask)
            parametrize.register_parametrization(parametrized.get_submodule(name), "weight", counting.Masked(mask))
    first, *others = (sr.squeeze(net, images(dtype=torch.float32)).model for net in (plain, pruned, parametrized))
    want = first.state_dict()
    assert counting.size(first) < counting.size(plain)
    for net in others:
        have = net.state_dict()
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("library", LIBRARIES)
def test_squeeze_train_prune_squeeze_again_merges_the_statistics(library: str) -> None:
    model = little(library).double()
    every_mode(model)
    small, first = check(model, images())
    norm = parts(list(every_block(small))[1]).norm
    assert isinstance(norm, CompensatedLayerNorm) and int(norm.count) == 3

    optimizer = torch.optim.SGD(small.train().parameters(), lr=0.05)
    nn.functional.cross_entropy(small(images(batch=4)), torch.randint(5, (4,))).backward()
    optimizer.step()
    block = parts(list(every_block(small.eval()))[1])
    with torch.no_grad():
        block.dw.weight[:2] = 0
        block.pw1.weight[:, :2] = 0
        constants = block.dw.bias[:2].clone()
    smaller, second = check(small, images())
    merged = parts(list(every_block(smaller))[1]).norm
    assert isinstance(merged, CompensatedLayerNorm) and int(merged.count) == 5 and len(merged.weight) == 12 - 5
    assert torch.allclose(merged.S, norm.S + constants.sum())
    assert torch.allclose(merged.Q, norm.Q + constants.square().sum())
    assert second.params_after < first.params_after
    assert_same(small, smaller, (images(32, 3),), {})
