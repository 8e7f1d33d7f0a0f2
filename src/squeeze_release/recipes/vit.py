"""A vision transformer: the paper's third result, and the full cycle, which the paper leaves open.

    squeeze-release run vit --preset paper --mode baseline --data IMAGENET --run-dir runs/vit
    squeeze-release run vit --preset best --run-dir runs/vit-cifar10

Presets: `paper`, ViT-Small on a folder of ImageNet, read with --data (train/CLASS/*.JPEG and val/CLASS/*.JPEG), from
the weights that timm has or from --start; `short`, the same protocol on CIFAR-10 at 64 pixels, with fewer epochs;
`quick`, a small one on a few images of it; `best`, where whole channels and heads go.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..cycle import Config, Result
from .imagenet import run_folder
from .images import Preset, run_preset
from .launch import Launch

RATES = {phase: 5e-5 for phase in ("train", "prune", "finetune", "final")}
# q, k and v rows go together, weights go in equal parts, and only every second epoch.
CYCLE: dict[str, Any] = {"joint": True, "schedule": "linear", "epochs_an_update": 2}


def vit(name: str = "vit_small_patch16_224", **arguments: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **arguments)
    return model


def small_vit() -> nn.Module:
    """ViT-Small for CIFAR-10, on images of 64 pixels."""
    return vit(img_size=64, patch_size=8, num_classes=10)


PRESETS = {
    "paper": Preset(
        Config(prune_epochs=100, finetune_epochs=10, final_epochs=10, threshold=0.6, rules="paper", **CYCLE),
        vit, size=224, batch=512, rates=RATES, weight_decay=5e-2, pad=28, share=0.4,
    ),
    "quick": Preset(
        Config(train_epochs=3, prune_epochs=4, finetune_epochs=1, final_epochs=1, max_cycles=2, threshold=0.11,
               max_drop=1.0, last_ratio=0.1, **CYCLE),
        lambda: vit(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=10),
        size=32, batch=50, rates={phase: 2e-3 for phase in RATES}, weight_decay=5e-2, images=1000,
    ),
    "short": Preset(
        Config(train_epochs=100, prune_epochs=32, finetune_epochs=4, final_epochs=10, max_cycles=2, threshold=0.6,
               rules="paper", **CYCLE),
        small_vit, size=64, batch=512, rates={**RATES, "train": 5e-4, "prune": 3e-4}, weight_decay=5e-2, pad=8,
        mix=True,
    ),
    "best": Preset(
        Config(train_epochs=100, prune_epochs=8, finetune_epochs=10, final_epochs=150, max_cycles=4, grain="channel",
               multiple=8, last_ratio=0.35, threshold=0.6, score="mean", judged="after training",
               max_loss=0.01, final_gain=0.02),
        small_vit, size=64, batch=256, rates={phase: 5e-4 for phase in RATES}, weight_decay=5e-2, pad=8, mix=True,
    ),
}  # fmt: skip


def run(preset: str, launch: Launch) -> Result:
    if preset == "paper":
        return run_folder(PRESETS[preset], launch)
    return run_preset(PRESETS[preset], launch)
