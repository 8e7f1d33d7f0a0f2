"""Networks for tests of `save` and `load`: built by name, squeezed twice, and run again in a process of their own.

As a script, `stored.py FOLDER`, it is what a user does elsewhere: build, load, run. Outputs go beside the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - makes torchvision importable
import torch
from check import noisy
from nets import Net, dead, unread
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.record import structure_of


def convnext_tiny() -> nn.Module:
    import timm

    small = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}
    return timm.create_model("convnext_tiny", num_classes=5, drop_path_rate=0.1, **small)


def convnext_tiny_wide() -> nn.Module:
    """With its real widths, one block a stage."""
    import timm

    return timm.create_model("convnext_tiny", num_classes=10, depths=(1, 1, 1, 1))


def convnext_tiny_whole() -> nn.Module:
    import timm

    return timm.create_model("convnext_tiny", num_classes=10)


def resnet18() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=5)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=40, hidden_size=16, intermediate_size=24, **heads))


_BUILDERS = (convnext_tiny, convnext_tiny_wide, convnext_tiny_whole, resnet18, encoder, llama, bert)
MODELS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in _BUILDERS}


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if name in ("llama", "bert"):
        return torch.randint(0, 40, (2, 7), generator=generator)
    shape = (2, 6, 16) if name == "encoder" else (2, 3, 32, 32)
    return torch.randn(shape, generator=generator)


def squeezed_twice(name: str) -> nn.Module:
    """Pruned, squeezed, trained for a step, pruned again, and squeezed with local compaction."""
    model, x = noisy(MODELS[name]()).eval(), inputs(name)
    small = sr.squeeze(prune(model, 0), x, verify=False).model
    step(small, x)
    return sr.squeeze(prune(small, 1), x, verify=False, compaction="index").model


@torch.no_grad()
def prune(model: nn.Module, seed: int) -> nn.Module:
    """A quarter of the rows of every layer, and a head or two of attention."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            rows = torch.randperm(len(module.weight), generator=generator)[: len(module.weight) // 4]
            module.weight[rows] = 0
        elif isinstance(module, nn.MultiheadAttention):
            module.out_proj.weight[:, : module.head_dim] = 0
    return model


def step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sum(t.float().square().mean() for t in tensors(model(x))).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    return tensors(model.eval()(x))


def tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, dict) else [output]
    return [value for value in values if isinstance(value, Tensor)]


def same(one: nn.Module, other: nn.Module, *inputs: Tensor) -> None:
    """To the bit, and in everything that a next squeeze or a training loop would see."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    assert [type(m) for m in one.modules()] == [type(m) for m in other.modules()] and str(one) == str(other)
    flags = [{name: p.requires_grad for name, p in m.named_parameters(remove_duplicate=False)} for m in (one, other)]
    assert flags[0] == flags[1] and structure_of(one) == structure_of(other)
    if inputs:
        assert all(map(torch.equal, run(one, *inputs), run(other, *inputs)))


def untouched(model: nn.Module, before: nn.Module) -> None:
    assert vars(model).keys() == vars(before).keys()
    same(model, before)


def fc() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def small_fc(**options: Any) -> nn.Module:
    net = noisy(fc())
    dead(net[0], 1, 5)
    unread(net[2], 3)
    return sr.squeeze(net, torch.randn(2, 4), **options).model


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)


def residual() -> nn.Module:
    body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    blocks = {"block": Residual(body), "mix": Residual(nn.Linear(8, 8)), "shift": Residual(nn.Linear(8, 8))}
    ends = {"stem": nn.Linear(5, 8), "norm": nn.LayerNorm(8), "out": nn.Linear(8, 3)}
    return Net(lambda s, x: s.out(s.norm(s.shift(s.mix(s.block(s.stem(x)))))), **blocks, **ends)


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def small_residual() -> nn.Module:
    """With a compensated norm, a shift, and layers that gather and place."""
    net = noisy(residual())
    for layer, rows in ((net.stem, 2), (net.block.body[3], 5), (net.mix.body, 2), (net.shift.body, 8)):
        dead(layer, *range(rows))
    for layer in (net.block.body[1], net.mix.body, net.out):
        unread(layer, 0, 1)  # which are constant all along the stream
    unread(net.mix.body, 3, 4, 5, 6)
    return sr.squeeze(net, torch.randn(2, 5), compaction="index").model


def small_attention() -> nn.Module:
    net = noisy(attention()).eval()
    unread(net.self_attn.out_proj, 0, 1, 2, 3)
    dead(net.linear1, 2, 7)
    return sr.squeeze(net, torch.randn(2, 5, 8)).model


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "fc": (fc, small_fc, (3, 4)),
    "residual": (residual, small_residual, (3, 5)),
    "attention": (attention, small_attention, (3, 4, 8)),
}


def main(folder: Path) -> None:
    """Inputs are those beside the file, where there are any."""
    torch.set_num_threads(1)
    for path in sorted(folder.glob("*.safetensors")):
        model, given = sr.load(MODELS[path.stem](), path), path.with_suffix(".inputs")
        x = load_file(given)["0"] if given.exists() else inputs(path.stem)
        save_file({str(i): t.contiguous() for i, t in enumerate(run(model, x))}, path.with_suffix(".out"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
