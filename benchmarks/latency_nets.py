"""The networks of `latency.py` with their masks, and who makes small ones of them.

Masks are planted as a structured pruner would leave them: of every width a share of the channels is dead, in all layers
that write a residual stream the same ones, rows of writers and columns of readers; of attention, whole heads. Biases of
dead rows stay where they are the same at every position, so what is dead is a constant and not always zero.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

with contextlib.suppress(ModuleNotFoundError):  # what the tests need may be missing on a machine that only measures
    import conftest  # noqa: F401  makes torchvision importable, which timm wants
import torch
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.recipes import fc_mnist


class Network(NamedTuple):
    build: Callable[..., nn.Module]
    mask: Callable[[nn.Module, float], None]
    shape: Callable[[int], tuple[int, ...]]  # of one input, by the side of an image


def of_timm(name: str) -> Callable[..., nn.Module]:
    def build(**arguments: Any) -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10, **arguments)
        return model

    return build


def some(width: int, share: float) -> Tensor:
    return torch.randperm(width)[: int(width * share)]


def silence(dead: Tensor, writers: Iterable[nn.Module] = (), readers: Iterable[nn.Module] = ()) -> None:
    for writer in writers:
        writer.weight[dead] = 0  # type: ignore[index, operator]
    for reader in readers:
        reader.weight[:, dead] = 0  # type: ignore[index, operator]


def mask_fc(model: nn.Module, share: float) -> None:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for writer, reader in itertools.pairwise(layers):
        silence(some(writer.out_features, share), [writer], [reader])


def mask_resnet(model: Any, share: float) -> None:
    stream, writers = some(64, share), [model.conv1]
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            inner = some(block.conv1.out_channels, share)
            silence(inner, [block.conv1], [block.conv2])
            silence(stream, writers, [block.conv1])
            if block.downsample is not None:
                silence(stream, (), [block.downsample[0]])
                stream, writers = some(block.conv2.out_channels, share), [block.downsample[0]]
            writers = [*writers, block.conv2]
    silence(stream, writers, [model.fc])


def mask_convnext(model: Any, share: float) -> None:
    stream = some(model.stem[0].out_channels, share)
    silence(stream, [model.stem[0]])
    model.stem[1].weight[stream] = 0
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            silence(stream, (), [stage.downsample[1]])
            stream = some(stage.downsample[1].out_channels, share)
            silence(stream, [stage.downsample[1]])
        for block in stage.blocks:
            silence(some(block.mlp.fc1.out_features, share), [block.mlp.fc1])
            silence(stream, [block.mlp.fc2, block.conv_dw], [block.mlp.fc1])
    silence(stream, (), [model.head.fc])


def mask_vit(model: Any, share: float) -> None:
    stream = some(model.embed_dim, share)
    silence(stream, [model.patch_embed.proj], [model.head])
    for tensor in (model.patch_embed.proj.bias, model.cls_token, model.pos_embed):  # each token has another: all zero
        tensor[..., stream] = 0
    for block in model.blocks:
        attention, mlp = block.attn, block.mlp
        heads = some(attention.num_heads, share)
        rows = torch.arange(attention.proj.in_features).view(attention.num_heads, -1)[heads].flatten()
        silence(rows, (), [attention.proj])
        attention.qkv.weight.unflatten(0, (3, -1))[:, rows] = 0
        silence(some(mlp.fc1.out_features, share), [mlp.fc1])
        silence(stream, [attention.proj, mlp.fc2], [attention.qkv, mlp.fc1])


NETWORKS = {
    "fc": Network(fc_mnist.build, mask_fc, lambda side: (1, 28, 28)),
    "resnet18": Network(of_timm("resnet18"), mask_resnet, lambda side: (3, side, side)),
    "convnext_tiny": Network(of_timm("convnext_tiny"), mask_convnext, lambda side: (3, side, side)),
    "vit_small": Network(of_timm("vit_small_patch16_224"), mask_vit, lambda side: (3, side, side)),
}


@torch.no_grad()
def masked(name: str, share: float, side: int) -> tuple[nn.Module, Tensor]:
    """The network full of zeros, with biases, scales and statistics that are not those of a fresh one; and an input."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = network.build(**({"img_size": side} if name == "vit_small" else {})).eval()
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() == 1 and tensor.is_floating_point():
            noise = 0.1 * torch.randn_like(tensor)
            tensor.add_(noise.abs() if tensor_name.endswith(("running_var", "gamma")) else noise)
    network.mask(model, share)
    return model, torch.randn(2, *network.shape(side))


def small(model: nn.Module, x: Tensor) -> nn.Module:
    return sr.squeeze(model, x).model


def ideal(model: nn.Module, narrow: nn.Module) -> nn.Module:
    """The small network, with norms of the model's own class in place of ours: another function, at the same widths."""
    plain = copy.deepcopy(narrow)
    for path, module in list(plain.named_modules()):
        if isinstance(module, sr.CompensatedLayerNorm):
            norm: Any = copy.deepcopy(model.get_submodule(path))
            norm.weight, norm.bias, norm.normalized_shape = module.weight, module.bias, module.normalized_shape
            parent, _, name = path.rpartition(".")
            setattr(plain.get_submodule(parent), name, norm)
    return plain


def torch_simplify(model: nn.Module, x: Tensor) -> nn.Module:
    from simplify import simplify

    result: nn.Module = simplify(copy.deepcopy(model), x[:1], fuse_bn=False)
    return result


def torch_pruning(model: nn.Module, x: Tensor) -> nn.Module:
    """It has no notion of zeros: we name the rows that are zero, and it removes them with what depends on them."""
    import torch_pruning as tp

    model = copy.deepcopy(model)
    free = [p for p in model.parameters() if p.dim() > 1 and not _in_layer(model, p)]  # position embeddings
    graph = tp.DependencyGraph().build_dependency(model, x[:1], unwrapped_parameters=[(p, p.dim() - 1) for p in free])
    for layer in [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]:
        dead = (layer.weight.flatten(1) == 0).all(1).nonzero().flatten().tolist()
        if isinstance(layer, nn.Conv2d) and layer.groups > 1:
            continue  # goes with the stream
        prune = tp.prune_conv_out_channels if isinstance(layer, nn.Conv2d) else tp.prune_linear_out_channels
        if dead:
            group = graph.get_pruning_group(layer, prune, idxs=dead)
            if graph.check_pruning_group(group):
                group.prune()
    return model


def _in_layer(model: nn.Module, parameter: nn.Parameter) -> bool:
    layers = (module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear)))
    return any(parameter is own for layer in layers for own in layer.parameters())


PEERS = {"torch-simplify": torch_simplify, "Torch-Pruning": torch_pruning}
