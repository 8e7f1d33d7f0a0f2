"""Models of transformers whose outputs are dataclasses and whose layers are none of torch's own."""

from __future__ import annotations

import pytest
import torch
from check import check, noisy
from nets import dead
from torch import nn

import squeeze_release as sr

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=24, n_inner=40)
    return noisy(transformers.GPT2LMHeadModel(config).eval())


IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(0))


def test_gpt2_loses_inner_channels_of_its_transposed_linears():
    net = gpt2()
    for block in net.transformer.h:
        dead(block.mlp.c_fc, 1, 2, 3, dim=1)
        with torch.no_grad():
            block.mlp.c_proj.weight[7] = 0
    golden = {"transformer.h.0.mlp.c_fc.weight": (16, 36), "transformer.h.0.mlp.c_fc.nf": 36}
    golden |= {"transformer.h.1.mlp.c_proj.weight": (36, 16), "transformer.h.1.mlp.c_proj.nf": 16}
    small = check(net, IDS, {"use_cache": False}, golden=golden, again=False).model
    assert small.transformer.wte.weight is small.lm_head.weight
    want, got = (
        model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0) for model in (net, small.eval())
    )
    assert torch.equal(want, got)


def test_gpt2_with_nothing_dead_stays():
    net = gpt2()
    golden = {"transformer.h.0.mlp.c_fc.weight": (16, 40), "transformer.h.0.attn.c_attn.weight": (16, 48)}
    check(net, IDS, {"use_cache": False}, golden=golden, again=False)


def test_model_output_with_hidden_states_keeps_the_stream():
    """What `output_hidden_states` hands out is an output: its width stays, though nothing reads those channels."""
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=31
    )
    net = noisy(transformers.BertForSequenceClassification(config).eval())
    layer = net.bert.encoder.layer[0]
    dead(layer.intermediate.dense, 5)
    with torch.no_grad():
        layer.output.LayerNorm.weight[3], net.bert.pooler.dense.weight[:, 3] = 0, 0
    golden = {"bert.encoder.layer.0.intermediate.dense.out_features": 23, "bert.pooler.dense.in_features": 16}
    squeezed = check(net, IDS, {"output_hidden_states": True}, golden=golden, again=False)
    output = squeezed.model(IDS, output_hidden_states=True)
    assert type(output) is type(net(IDS)) and [h.shape[-1] for h in output.hidden_states] == [16, 16]


def test_config_is_left_alone_and_not_shared_with_the_original():
    net = gpt2()
    dead(net.transformer.h[0].mlp.c_fc, 1, dim=1)
    small = sr.squeeze(net, IDS, {"use_cache": False}).model
    assert small.config.n_inner == 40 and small.config is not net.config
