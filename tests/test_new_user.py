"""As a new user would: build, prune, squeeze, save, load elsewhere, export, run without the package, and time it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import elsewhere
import pytest
import stored
import torch
from check import noisy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune
from typer.testing import CliRunner

import squeeze_release as sr
from squeeze_release import cli

pytestmark = pytest.mark.usefixtures("one_thread")
STARTED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
SUFFIXES = (".onnx", ".pt2")


def pruned_convnext(name: str) -> nn.Module:
    """Three of four hidden units of every block have a mask."""
    model = noisy(stored.MODELS[name]()).eval()
    for path, module in model.named_modules():
        if path.endswith("mlp.fc1"):
            prune.ln_structured(module, "weight", amount=0.75, n=2, dim=0)
    return model


def test_convnext_tiny(tmp_path: Path) -> None:
    convnext_journey("convnext_tiny_wide", "timm:convnext_tiny?num_classes=10&depths=[1,1,1,1]", tmp_path)


@pytest.mark.slow
def test_convnext_tiny_with_all_its_blocks(tmp_path: Path) -> None:
    convnext_journey("convnext_tiny_whole", "timm:convnext_tiny?num_classes=10", tmp_path)


def convnext_journey(name: str, spec: str, folder: Path) -> None:
    model, x = pruned_convnext(name), torch.randn(4, 3, 32, 32)
    small, report = sr.squeeze(model, x)
    assert report.max_error is not None and report.max_error < 1e-10
    assert report.params_after < 0.6 * report.params_before
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)
    deploy(small, x, name, folder)
    carry_on({name: small}, {name: x}, folder)

    torch.save(model.state_dict(), folder / "pruned.pt")  # masks and all
    timed = ["bench", spec, folder / "pruned.pt", "--input", "4x3x32x32", "--small", folder / f"{name}.safetensors"]
    result = CliRunner().invoke(cli.app, [*map(str, timed), "--json", "--seconds", "0.5"], catch_exceptions=False)
    (found,) = json.loads(result.stdout)["benches"]
    masked, squeezed = found["rows"][:2]
    assert masked["seconds_median"] > 0 and squeezed["seconds_median"] > 0
    assert masked["parameter_bytes"] > 1.6 * squeezed["parameter_bytes"]


def test_an_encoder_after_two_squeezes_with_a_training_step_between(tmp_path: Path) -> None:
    journeys(["encoder"], tmp_path)


@pytest.mark.slow  # for the imports
def test_others_after_two_squeezes_with_a_training_step_between(tmp_path: Path) -> None:
    journeys(["resnet18", "llama", "bert"], tmp_path)


def journeys(names: list[str], folder: Path) -> None:
    smalls = {name: stored.squeezed_twice(name) for name in names}
    inputs = {name: stored.inputs(name) for name in names}
    for name, small in smalls.items():
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in stored.MODELS[name]().parameters())
        deploy(small, inputs[name], name, folder)
    carry_on(smalls, inputs, folder)


def deploy(small: nn.Module, x: Tensor, name: str, folder: Path) -> None:
    sr.save(small, folder / f"{name}.safetensors")
    save_file({"0": x}, folder / f"{name}.inputs")
    for suffix in SUFFIXES:
        done = sr.export(small, x, folder / f"{name}{suffix}")
        assert done.max_error is not None and done.max_error <= 1e-5 and len(done.batches) > 1


def carry_on(smalls: dict[str, nn.Module], inputs: dict[str, Tensor], folder: Path) -> None:
    """In new processes: one that builds and loads, and one in which the package cannot be imported."""
    environment = os.environ | STARTED | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, stored.__file__, str(folder)], check=True, env=environment)
    subprocess.run([sys.executable, "-I", elsewhere.__file__, str(folder)], check=True)
    for name, small in smalls.items():
        expected = stored.run(small, inputs[name])
        assert float(expected[0].std()) > 1e-3
        loaded = load_file(folder / f"{name}.out")
        assert len(loaded) == len(expected)
        assert all(torch.equal(loaded[str(i)], value) for i, value in enumerate(expected)), name  # to the bit
        for suffix in SUFFIXES:
            for ending, x in (("out", inputs[name]), ("out1", inputs[name][:1])):
                found = load_file(folder / f"{name}{suffix}.{ending}")
                for i, value in enumerate(stored.run(small, x)):
                    error = float((found[str(i)] - value).abs().max() / value.abs().max())
                    assert error <= 1e-5, (name, suffix, ending, i)


def wide_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=2048, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def wide_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, use_cache=False, **sizes))


def wide_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 128, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=40, **sizes))


HIDDEN = ("linear1", "gate_proj", "intermediate.dense", "conv1")  # the first layer of every block


@torch.no_grad()
def let_half_die(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if path.endswith(HIDDEN) and path != "conv1":
            module.weight[: len(module.weight) // 2] = 0
            if getattr(module, "bias", None) is not None:
                module.bias[: len(module.weight) // 2] = 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "encoder", "llama", "bert"])
def test_others_are_faster_after_two_squeezes_with_a_training_step_between(name: str) -> None:
    """Those above are too small for it: there the clock counts calls, not channels."""
    build = {"resnet18": stored.MODELS["resnet18"], "encoder": wide_encoder, "llama": wide_llama, "bert": wide_bert}
    model = noisy(build[name]()).eval()
    tokens, floats = torch.randint(0, 40, (8, 64)), torch.randn(8, 64, 128)
    x = {"resnet18": torch.randn(8, 3, 64, 64), "encoder": floats}.get(name, tokens)
    let_half_die(model)
    small = sr.squeeze(model, x).model
    stored.step(small, x)
    let_half_die(small)
    small = sr.squeeze(small, x).model
    assert sr.bench((model, small), x, seconds=0.5).speedup() > 1.2
