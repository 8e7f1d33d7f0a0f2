"""Small random models of transformers: dead heads and MLP channels go, and generation gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from check import check
from nets import reasons
from torch import Tensor, nn

import squeeze_release as sr

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "pad_token_id": 0}
PATCHES = {"image_size": 32, "patch_size": 8}
VISION = {k: v for k, v in COMMON.items() if k not in ("vocab_size", "max_position_embeddings")} | PATCHES


class Family(NamedTuple):
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    out: str  # the output projection of the first attention
    heads: list[int]  # of 4, dead
    hidden: str  # a linear layer that writes MLP channels
    golden: dict[str, object]


def ids() -> Tensor:
    return torch.randint(3, 60, (2, 7))


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64)


def of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


def decoder(name: str, **options: Any) -> Family:
    """Four query heads on two key heads: the first group is dead."""
    layer = "model.layers.0"
    golden = {
        f"{layer}.self_attn.q_proj.out_features": 16,
        f"{layer}.self_attn.k_proj.out_features": 8,
        f"{layer}.self_attn.v_proj.out_features": 8,
        f"{layer}.mlp.gate_proj.out_features": 30,
        f"{layer}.mlp.up_proj.out_features": 30,
    }
    build = of(f"{name}ForCausalLM", f"{name}Config", **GROUPED, **options)
    return Family(build, ids, f"{layer}.self_attn.o_proj", [0, 1], f"{layer}.mlp.gate_proj", golden)


def encoder(build: Callable[[], nn.Module], out: str, query: str, hidden: str, example: Any = ids) -> Family:
    golden = {f"{query}.out_features": 24, f"{out}.in_features": 24, f"{hidden}.out_features": 30}
    return Family(build, example, out, [1], hidden, golden)


def whisper() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        transformers.WhisperConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=40,
            num_mel_bins=16,
            max_source_positions=20,
        )
    )


BERT = ("encoder.layer.0.attention.output.dense", "encoder.layer.0.attention.self.query")
OPT = {k: v for k, v in COMMON.items() if k != "intermediate_size"} | {"ffn_dim": 40, "word_embed_proj_dim": 32}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 40, "use_cache": False}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4}
DISTIL = {"vocab_size": 64, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}

FAMILIES = {
    "bert": encoder(of("BertModel", "BertConfig", **COMMON), *BERT, "encoder.layer.0.intermediate.dense"),
    "roberta": encoder(of("RobertaModel", "RobertaConfig", **COMMON), *BERT, "encoder.layer.0.intermediate.dense"),
    "distilbert": encoder(
        of("DistilBertModel", "DistilBertConfig", **DISTIL),
        "transformer.layer.0.attention.out_lin",
        "transformer.layer.0.attention.q_lin",
        "transformer.layer.0.ffn.lin1",
    ),
    "opt": encoder(
        of("OPTForCausalLM", "OPTConfig", **OPT, use_cache=False),
        "model.decoder.layers.0.self_attn.out_proj",
        "model.decoder.layers.0.self_attn.q_proj",
        "model.decoder.layers.0.fc1",
    ),
    "phi": encoder(
        of("PhiForCausalLM", "PhiConfig", **COMMON, use_cache=False),
        "model.layers.0.self_attn.dense",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.fc1",
    ),
    "gpt2": Family(
        of("GPT2LMHeadModel", "GPT2Config", **GPT2),
        ids,
        "transformer.h.0.attn.c_proj",
        [1],
        "transformer.h.0.mlp.c_fc",
        {"transformer.h.0.attn.c_attn.weight": (32, 72), "transformer.h.0.mlp.c_fc.weight": (32, 30)},
    ),
    "t5": encoder(
        of("T5EncoderModel", "T5Config", **T5),
        "encoder.block.0.layer.0.SelfAttention.o",
        "encoder.block.0.layer.0.SelfAttention.q",
        "encoder.block.0.layer.1.DenseReluDense.wi",
    ),
    "clip": encoder(
        of("CLIPTextModel", "CLIPTextConfig", **COMMON),
        "encoder.layers.0.self_attn.out_proj",
        "encoder.layers.0.self_attn.q_proj",
        "encoder.layers.0.mlp.fc1",
    ),
    "whisper": encoder(
        whisper,
        "layers.0.self_attn.out_proj",
        "layers.0.self_attn.q_proj",
        "layers.0.fc1",
        lambda: torch.randn(2, 16, 40, dtype=torch.float64),
    ),
    "llama": decoder("Llama"),
    "llama eager": decoder("Llama", attn_implementation="eager"),
    "mistral": decoder("Mistral"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "gemma": decoder("Gemma"),
    "gemma2": decoder("Gemma2"),
}


@torch.no_grad()
def rough(model: nn.Module) -> nn.Module:
    """No constant is 0 or 1 by accident, and softmaxes are not flat."""
    for name, parameter in model.named_parameters():
        parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 or "relative" in name else 0.05))
    return model.double().eval()


@torch.no_grad()
def kill_heads(out: nn.Module, *heads: int, size: int = 8) -> None:
    """Nothing of these heads is read."""
    reads = out.weight if type(out).__name__ == "Conv1D" else out.weight.T
    for head in heads:
        reads[head * size : (head + 1) * size] = 0


@torch.no_grad()
def kill_channels(layer: nn.Module) -> None:
    """Every fourth channel is 0."""
    writes = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
    writes[::4] = 0
    if layer.bias is not None:
        layer.bias[::4] = 0


@pytest.mark.parametrize("name", FAMILIES)
def test_dead_heads_and_channels_go(name: str) -> None:
    family = FAMILIES[name]
    model = rough(family.build())
    kill_heads(model.get_submodule(family.out), *family.heads)
    kill_channels(model.get_submodule(family.hidden))
    check(model, family.example(), golden=family.golden, again=False)


def test_swin_loses_a_head_and_its_column_of_relative_positions() -> None:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4
    )
    model = rough(transformers.SwinModel(config))
    kill_heads(model.encoder.layers[1].blocks[1].attention.o_proj, 2)
    attention = "encoder.layers.1.blocks.1.attention"
    check(
        model,
        image(),
        again=False,
        golden={
            f"{attention}.q_proj.out_features": 24,
            f"{attention}.relative_position_bias.relative_position_bias_table": (49, 3),
            "encoder.layers.1.blocks.0.attention.q_proj.out_features": 32,
        },
    )


def test_swin_is_left_with_one_head() -> None:
    """What is laid out anew in memory depends on the number of heads, and matters to nobody."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    model = rough(transformers.SwinModel(config))
    kill_heads(model.encoder.layers[0].blocks[0].attention.o_proj, 0)
    check(model, image(), again=False, golden={"encoder.layers.0.blocks.0.attention.q_proj.out_features": 8})


def test_t5_cross_attention_loses_a_head() -> None:
    """Its bias is zeros, one for each head, made in the forward."""
    model = rough(of("T5Model", "T5Config", **T5, num_decoder_layers=1, use_cache=False)())
    kill_heads(model.decoder.block[0].layer[1].EncDecAttention.o, 3)
    attention = "decoder.block.0.layer.1.EncDecAttention"
    check(
        model,
        ids(),
        {"decoder_input_ids": ids()},
        again=False,
        golden={
            f"{attention}.k.out_features": 24,
            f"{attention}.n_heads": 3,
            "decoder.block.0.layer.0.SelfAttention.n_heads": 4,
        },
    )


def test_heads_that_share_a_table_of_relative_positions_go_together() -> None:
    """T5 computes it in the first block and hands it on."""
    model = rough(of("T5EncoderModel", "T5Config", **{**T5, "num_layers": 2})())
    kill_heads(model.encoder.block[0].layer[0].SelfAttention.o, 1, 2)
    kill_heads(model.encoder.block[1].layer[0].SelfAttention.o, 2, 3)
    attention = "encoder.block.{}.layer.0.SelfAttention"
    check(
        model,
        ids(),
        again=False,
        golden={
            f"{attention.format(0)}.q.out_features": 24,
            f"{attention.format(1)}.v.out_features": 24,
            f"{attention.format(0)}.relative_attention_bias.weight": (32, 3),
        },
    )


# ------------------------------------------------------------------------------------------------- Llama that generates


def llama(*dead: int, **options: Any) -> nn.Module:
    """Eight query heads of width 4 on four key heads."""
    sizes = {**COMMON, "num_hidden_layers": 2, "num_attention_heads": 8, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None, **options
    )
    model = rough(transformers.LlamaForCausalLM(config))
    for layer in model.model.layers:
        kill_heads(layer.self_attn.o_proj, *dead, size=4)
        kill_channels(layer.mlp.gate_proj)
    return model


def heads_of(model: nn.Module) -> tuple[int, int]:
    (sizes,) = {(a.self_attn.q_proj.out_features, a.self_attn.k_proj.out_features) for a in model.model.layers}
    return sizes[0] // 4, sizes[1] // 4


GO = {"a group": ([2, 3], (6, 3)), "one of each group": ([0, 3, 4, 7], (4, 4)), "both": ([0, 1, 2, 5, 7], (3, 3))}


@pytest.mark.parametrize("dead", GO)
def test_llama_generates_the_same_tokens(dead: str) -> None:
    heads, left = GO[dead]
    model, prompt = llama(*heads), ids()
    small, report = sr.squeeze(model, prompt, {"use_cache": False})
    assert heads_of(small) == left, str(report)
    assert [layer.mlp.up_proj.out_features for layer in small.model.layers] == [30, 30]
    assert [layer.self_attn.layer_idx for layer in small.model.layers] == [0, 1]
    padded = torch.ones_like(prompt)
    padded[0, :3] = prompt[0, :3] = 0
    for cache in ("dynamic", "static"):
        tokens = [
            m.generate(
                prompt, attention_mask=padded, max_new_tokens=12, do_sample=False, cache_implementation=cache
            ).tolist()
            for m in (model, small)
        ]
        assert tokens[0] == tokens[1]
        assert len(set(tokens[0][0][7:] + tokens[0][1][7:])) > 2, "a test that any model would pass"


@pytest.mark.parametrize("dead", [[0], [0, 3], [0, 2, 4]])
def test_groups_of_queries_stay_equally_large(dead: list[int]) -> None:
    """One head of some groups only: they stay, for every key head is read by equally many."""
    small, report = sr.squeeze(llama(*dead), ids(), {"use_cache": False})
    assert heads_of(small) == (8, 4)
    assert "equally many" in reasons(report)


def test_llama_generates_the_same_tokens_on_a_narrower_stream() -> None:
    """Channels of the stream that nobody writes go from the embedding, every layer and the head."""
    model, prompt = llama(2, 3, tie_word_embeddings=True), ids()
    with torch.no_grad():
        for channel in (3, 17):
            model.model.embed_tokens.weight[:, channel] = 0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[channel] = layer.mlp.down_proj.weight[channel] = 0
    small, report = sr.squeeze(model, prompt, {"use_cache": False})
    assert small.model.embed_tokens.weight.shape == small.lm_head.weight.shape == (64, 30), str(report)
    assert heads_of(small) == (6, 3)
    padded = torch.ones_like(prompt)
    padded[1, :2] = prompt[1, :2] = 0
    for cache in ("dynamic", "static"):
        old, new = (
            m.generate(prompt, attention_mask=padded, max_new_tokens=12, do_sample=False, cache_implementation=cache)
            for m in (model, small)
        )
        assert torch.equal(old, new)


def test_a_language_model_as_it_comes_with_its_cache_on() -> None:
    options = {**GROUPED, "use_cache": True}
    model = of("LlamaForCausalLM", "LlamaConfig", **options)().double().eval()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, :10] = 0
    small = sr.squeeze(model, ids()).model
    assert small.model.layers[0].mlp.up_proj.out_features == 30
    assert model.config.use_cache and small.config.use_cache and small(ids()).past_key_values is not None


def test_the_cache_is_on_again_after_an_error() -> None:
    model = of("LlamaForCausalLM", "LlamaConfig", **{**GROUPED, "use_cache": True})()
    with pytest.raises(sr.InputError):
        sr.squeeze(model, torch.full((2, 7), 1000))
    assert model.config.use_cache


def constant_values(model: nn.Module, path: str) -> nn.Module:
    """The values of head 1 are the same for every token, and not 0."""
    model = rough(model)
    with torch.no_grad():
        model.get_submodule(path).weight[8:16] = 0
    return model


def test_constant_values_pass_a_mask_that_the_code_makes() -> None:
    """Traced by torch.export, ViT and OPT make a mask where in eager they have none: no row of it is all masked."""
    vit = constant_values(of("ViTForImageClassification", "ViTConfig", **VISION)(), "vit.layers.0.attention.v_proj")
    check(vit, image(), golden={"vit.layers.0.attention.v_proj.out_features": 24})
    opt = of("OPTForCausalLM", "OPTConfig", **OPT, use_cache=False)()
    opt = constant_values(opt, "model.decoder.layers.0.self_attn.v_proj")
    check(opt, ids(), golden={"model.decoder.layers.0.self_attn.v_proj.out_features": 24})


def test_constant_values_stay_under_a_mask_from_outside() -> None:
    opt = of("OPTForCausalLM", "OPTConfig", **OPT, use_cache=False)()
    opt = constant_values(opt, "model.decoder.layers.0.self_attn.v_proj")
    example = ids()
    squeezed = sr.squeeze(opt.double(), example, {"attention_mask": torch.ones_like(example)})
    assert squeezed.model.model.decoder.layers[0].self_attn.v_proj.out_features == 32
