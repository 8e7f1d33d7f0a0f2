"""The models of the coverage run: one of every timm family, of every torchvision family, and small transformers.

A timm family is a file of `timm.models`; its model is the smallest that is not a test model, at the smallest input
that it takes. Where even that is large for its kind, depth and width are cut by timm's own arguments. Weights are
random: nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import conftest  # noqa: F401  makes torchvision importable, which timm wants
import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
CLASSES = 10


@dataclass(frozen=True)
class Entry:
    """One model: how it is built, and how it is called."""

    name: str
    family: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Call]


# ----------------------------------------------------------------------------------------------------------------- timm

_NARROW = {"embed_dim": 192, "depth": 4, "num_heads": 3}
_TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {  # family -> model, input size, arguments
    "beit": ("beit_base_patch16_224", 64, {"img_size": 64, **_NARROW}),
    "byoanet": ("halonet_h1", 256, {}),
    "byobnet": ("mobileone_s1", 64, {}),
    "cait": ("cait_xxs24_224", 64, {"img_size": 64}),
    "coat": ("coat_tiny", 64, {"img_size": 64}),
    "convit": ("convit_tiny", 64, {"img_size": 64}),
    "convmixer": ("convmixer_768_32", 64, {}),
    "convnext": ("convnext_zepto_rms", 64, {}),
    "cpubone": ("cpubone_nano", 64, {}),
    "crossvit": ("crossvit_tiny_240", 240, {}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("cs3darknet_focus_s", 64, {}),
    "davit": ("davit_tiny", 64, {}),
    "deepseek_vit": ("deepseek_vit_412m", 224, _NARROW),
    "deit": ("deit_tiny_patch16_224", 64, {"img_size": 64}),
    "densenet": ("densenet121", 64, {}),
    "dla": ("dla46x_c", 64, {}),
    "dpn": ("dpn48b", 64, {}),
    "edgenext": ("edgenext_xx_small", 64, {}),
    "efficientformer": ("efficientformer_l1", 224, {}),
    "efficientformer_v2": ("efficientformerv2_s0", 64, {"img_size": 64}),
    "efficientnet": ("mobilenetv2_035", 64, {}),
    "efficientvim": ("efficientvim_m1", 64, {}),
    "efficientvit_mit": ("efficientvit_b0", 64, {}),
    "efficientvit_msra": ("efficientvit_m0", 64, {"img_size": 64}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 64, {}),
    "fasternet": ("fasternet_t0", 64, {}),
    "fastvit": ("fastvit_t8", 64, {}),
    "focalnet": ("focalnet_tiny_srf", 64, {}),
    "gcvit": ("gcvit_xxtiny", 64, {"img_size": 64}),
    "gemma4_vit": ("gemma4_vit_167m", 96, _NARROW),
    "ghostnet": ("ghostnet_050", 64, {}),
    "hardcorenas": ("hardcorenas_b", 64, {}),
    "hgnet": ("hgnetv2_b0", 64, {}),
    "hiera": ("hiera_tiny_224", 64, {"img_size": 64}),
    "hieradet_sam2": ("sam2_hiera_tiny", 64, {}),
    "hrnet": ("hrnet_w18_small", 64, {}),
    "iformer": ("iformer_t", 64, {}),
    "inception_next": ("inception_next_atto", 64, {}),
    "inception_resnet_v2": ("inception_resnet_v2", 96, {}),
    "inception_v3": ("inception_v3", 96, {}),
    "inception_v4": ("inception_v4", 155, {}),
    "lcnetv2": ("lcnetv2_small", 64, {}),
    "levit": ("levit_128s", 64, {"img_size": 64}),
    "lowformer": ("lowformer_b0", 64, {}),
    "mambaout": ("mambaout_femto", 64, {}),
    "maxxvit": ("maxvit_pico_rw_256", 64, {"img_size": 64}),
    "metaformer": ("poolformerv2_s12", 64, {}),
    "mlp_mixer": ("gmlp_ti16_224", 64, {"img_size": 64}),
    "mobilenetv3": ("lcnet_035", 64, {}),
    "mobilenetv5": ("mobilenetv5_base", 64, {}),
    "mobilevit": ("mobilevit_xxs", 64, {}),
    "mvitv2": ("mvitv2_tiny", 64, {}),
    "naflexvit": ("naflexvit_base_patch16_parfac_gap", 64, _NARROW),
    "nasnet": ("nasnetalarge", 64, {"stem_size": 24, "num_features": 1056}),
    "nest": ("nest_tiny", 64, {"img_size": 64}),
    "nextvit": ("nextvit_small", 64, {}),
    "nfnet": ("nf_regnet_b0", 64, {}),
    "pit": ("pit_ti_224", 64, {"img_size": 64}),
    "pnasnet": ("pnasnet5large", 64, {}),
    "pvt_v2": ("pvt_v2_b0", 64, {}),
    "qwen3_vit": ("qwen3_vit_88m", 64, _NARROW),
    "rdnet": ("rdnet_tiny", 64, {}),
    "regnet": ("regnetx_002", 64, {}),
    "repghost": ("repghostnet_050", 64, {}),
    "repvit": ("repvit_m1", 64, {}),
    "res2net": ("res2next50", 64, {}),
    "resnest": ("resnest14d", 64, {}),
    "resnet": ("resnet10t", 64, {}),
    "resnetv2": ("resnetv2_18", 64, {}),
    "rexnet": ("rexnet_100", 64, {}),
    "selecsls": ("selecsls42", 64, {}),
    "senet": ("legacy_seresnet18", 64, {}),
    "sequencer": ("sequencer2d_s", 64, {}),
    "shvit": ("shvit_s1", 64, {}),
    "sknet": ("skresnet18", 64, {}),
    "starnet": ("starnet_s050", 64, {}),
    "swiftformer": ("swiftformer_xs", 64, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 64, {"img_size": 64, "window_size": 4}),
    "swin_transformer_v2": ("swinv2_tiny_window16_256", 64, {"img_size": 64}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 64, {"img_size": 64}),
    "tiny_vit": ("tiny_vit_5m_224", 64, {}),
    "tnt": ("tnt_s_legacy_patch16_224", 64, {"img_size": 64}),
    "tresnet": ("tresnet_m", 64, {}),
    "twins": ("twins_svt_small", 64, {}),
    "vgg": ("vgg11", 64, {"mlp_ratio": 0.125}),
    "visformer": ("visformer_tiny", 64, {"img_size": 64}),
    "vision_transformer": ("vit_tiny_patch16_224", 64, {"img_size": 64}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 64, {"img_size": 64}),
    "vision_transformer_relpos": ("vit_srelpos_small_patch16_224", 64, {"img_size": 64}),
    "vision_transformer_sam": ("samvit_base_patch16_224", 64, _NARROW),
    "vitamin": ("vitamin_small_224", 64, {"img_size": 64}),
    "volo": ("volo_d1_224", 64, {"img_size": 64}),
    "vovnet": ("ese_vovnet19b_slim_dw", 64, {}),
    "xception": ("legacy_xception", 64, {}),
    "xception_aligned": ("xception41p", 64, {}),
    "xcit": ("xcit_nano_12_p8_224", 64, {}),
}


def _timm(family: str) -> Entry:
    name, size, arguments = _TIMM[family]

    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **arguments)
        return model

    return Entry(name, family, "timm", build, _images(size))


def missing_timm_families() -> list[str]:
    """Families of the installed timm that the list above does not know."""
    from timm.models import list_modules

    return sorted(set(list_modules()) - set(_TIMM))


# ---------------------------------------------------------------------------------------------------------- torchvision

_TORCHVISION: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alexnet": ("alexnet", 64, {}),
    "convnext": ("convnext_tiny", 64, {}),
    "densenet": ("densenet121", 64, {}),
    "efficientnet": ("efficientnet_b0", 64, {}),
    "googlenet": ("googlenet", 64, {"init_weights": False, "aux_logits": False}),
    "inception": ("inception_v3", 96, {"init_weights": False, "aux_logits": False}),
    "maxvit": ("maxvit_t", 224, {}),
    "mnasnet": ("mnasnet0_5", 64, {}),
    "mobilenetv2": ("mobilenet_v2", 64, {}),
    "mobilenetv3": ("mobilenet_v3_small", 64, {}),
    "regnet": ("regnet_y_400mf", 64, {}),
    "resnet": ("resnet18", 64, {}),
    "resnext": ("resnext50_32x4d", 64, {}),
    "shufflenetv2": ("shufflenet_v2_x0_5", 64, {}),
    "squeezenet": ("squeezenet1_1", 64, {}),
    "swin_transformer": ("swin_t", 224, {}),
    "vgg": ("vgg11_bn", 64, {}),
    "vision_transformer": ("vit_b_32", 64, {"image_size": 64}),
    "segmentation": ("lraspp_mobilenet_v3_large", 64, {"weights_backbone": None}),
}


def _torchvision(family: str) -> Entry:
    name, size, arguments = _TORCHVISION[family]

    def build() -> nn.Module:
        from torchvision.models import get_model

        model: nn.Module = get_model(name, weights=None, num_classes=CLASSES, **arguments)
        return model

    return Entry(f"tv_{name}", family, "torchvision", build, _images(size))


# --------------------------------------------------------------------------------------------------------- transformers

_VOCABULARY, _LENGTH = 97, 12
_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "max_position_embeddings": 40,
    "num_labels": CLASSES,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "use_cache": False}
del _DECODER["num_labels"]
_PATCHES = {**_ENCODER, "image_size": 32, "patch_size": 8}
_VISION = {key: _PATCHES[key] for key in _PATCHES if key not in ("vocab_size", "max_position_embeddings", "num_labels")}
_TEXT = {key: _ENCODER[key] for key in _ENCODER if key != "num_labels"}

_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], str]] = {  # family -> config, model, arguments, kind of input
    "bert": ("BertConfig", "BertForSequenceClassification", _ENCODER, "padded"),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": _VOCABULARY, "dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 160, "num_labels": CLASSES},
        "padded",
    ),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", _ENCODER, "padded"),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 40, "use_cache": False},
        "tokens",
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 160,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 64,
            "use_cache": False,
        },
        "tokens",
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER, "tokens"),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER, "tokens"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}, "tokens"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}, "tokens"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_DECODER, "head_dim": 16}, "tokens"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_DECODER, "head_dim": 16}, "tokens"),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_DECODER, "num_key_value_heads": 4}, "tokens"),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 160,
            "num_layers": 4,
            "num_heads": 4,
            "use_cache": False,
        },
        "pairs",
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {**_VISION, "num_labels": CLASSES}, "images"),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 4],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        "images",
    ),
    "clip": ("CLIPConfig", "CLIPModel", {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 48}, "clip"),
    "whisper": (
        "WhisperConfig",
        "WhisperForAudioClassification",
        {
            "d_model": 64,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 160,
            "decoder_layers": 1,
            "decoder_attention_heads": 4,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "classifier_proj_size": 48,
            "num_labels": CLASSES,
        },
        "audio",
    ),
}


def _transformers(family: str) -> Entry:
    config, model, arguments, kind = _TRANSFORMERS[family]

    def build() -> nn.Module:
        import transformers

        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if kind not in ("images", "clip") else {}
        settings = getattr(transformers, config)(**arguments, **special)
        built: nn.Module = getattr(transformers, model)(settings)
        return built

    return Entry(model, family, "transformers", build, _KINDS[kind])


# --------------------------------------------------------------------------------------------------------------- inputs


def _images(size: int) -> Callable[[int, torch.Generator], Call]:
    def inputs(batch: int, generator: torch.Generator) -> Call:
        return (torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64),), {}

    return inputs


def _words(batch: int, generator: torch.Generator, length: int = _LENGTH) -> Tensor:
    return torch.randint(3, _VOCABULARY, (batch, length), generator=generator)


def _tokens(batch: int, generator: torch.Generator) -> Call:
    return (), {"input_ids": _words(batch, generator)}


def _padded(batch: int, generator: torch.Generator) -> Call:
    mask = torch.ones(batch, _LENGTH, dtype=torch.int64)
    mask[0, -3:] = 0
    return (), {"input_ids": _words(batch, generator), "attention_mask": mask}


def _pairs(batch: int, generator: torch.Generator) -> Call:
    return (), {
        "input_ids": _words(batch, generator),
        "decoder_input_ids": _words(batch, generator, 7),
    }


def _clip(batch: int, generator: torch.Generator) -> Call:
    (pixels,), _ = _images(32)(batch, generator)
    return (), {"input_ids": _words(batch, generator), "pixel_values": pixels}


def _audio(batch: int, generator: torch.Generator) -> Call:
    return (), {"input_features": torch.randn(batch, 16, 40, generator=generator, dtype=torch.float64)}


def _pixels(batch: int, generator: torch.Generator) -> Call:
    (pixels,), _ = _images(32)(batch, generator)
    return (), {"pixel_values": pixels}


_KINDS = {"tokens": _tokens, "padded": _padded, "pairs": _pairs, "images": _pixels, "clip": _clip, "audio": _audio}

ENTRIES: tuple[Entry, ...] = (
    *map(_transformers, _TRANSFORMERS),
    *map(_torchvision, _TORCHVISION),
    *map(_timm, _TIMM),
)
